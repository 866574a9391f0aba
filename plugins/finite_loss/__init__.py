"""A run whose loss or gradients are no longer finite ends, and keeps its last good checkpoint."""
