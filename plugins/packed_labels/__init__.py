"""Packed conversations whose labels are the next token, and nothing behind the last."""
