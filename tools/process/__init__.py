"""Processes: signals, children, memory of compiling ones, and saying how far long work is."""
