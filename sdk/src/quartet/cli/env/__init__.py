"""Environments on this machine: made, installed, described, checked."""
