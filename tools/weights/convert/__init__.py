"""Weights from one form into the other."""
