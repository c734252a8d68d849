"""Whole models with random weights, for ``python -m bench model``."""
