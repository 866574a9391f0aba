"""Bytes of a device: weights, optimizer state, activations, and how far off predictions were."""
