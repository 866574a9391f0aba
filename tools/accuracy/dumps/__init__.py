"""Folders that msprobe's debugger writes: their names, their completeness, their tensors."""
