"""Strategies by predicted step time: ranked, placed, verified."""
