"""The gradient of grouped weights, added in place."""
