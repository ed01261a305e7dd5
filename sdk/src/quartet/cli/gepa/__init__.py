"""Prompt optimisation: the system prompt of an environment, improved by reflection (GEPA)."""
