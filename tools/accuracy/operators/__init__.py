"""Operators against a golden baseline (report section 3.1)."""
