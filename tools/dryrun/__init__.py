"""Compile a recipe's real sharded graph for thousands of devices on this CPU, and read what it holds."""
