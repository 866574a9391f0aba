"""Weights as files: what a checkpoint holds, what sets two apart, the average of several."""
