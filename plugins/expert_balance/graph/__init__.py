"""Experts that move in a sharded graph: on Ascend, and in semi-auto parallel on CPU."""
