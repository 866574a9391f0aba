"""What fusing saves on a compiled graph: kernels, bytes of HBM traffic, and the fusions that MindSpore knows by name."""
