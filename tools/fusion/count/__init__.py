"""What fusing saves on a compiled graph: kernels, bytes of HBM traffic, fusions that MindSpore knows by name."""
