"""Evaluations: rollouts of hosted environments, measured and recorded."""
