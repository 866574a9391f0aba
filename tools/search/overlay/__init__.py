"""A strategy written as a child of its recipe."""
