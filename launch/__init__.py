"""Start training, here or on a cluster."""
