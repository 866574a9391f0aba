"""This package starts training, on this host or on a cluster."""
