"""Operator specs, by family."""
