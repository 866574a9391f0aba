"""Expert-parallel communication that knows which ranks share a machine (report 4.3): plans, bytes and checks.

Importing this package imports nothing else.
"""
