"""`tc3 runs watch`: a run followed while it goes on, on a terminal, for Prometheus and for TensorBoard."""
