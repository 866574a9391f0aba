"""The answer of a search as text, page and pictures."""
