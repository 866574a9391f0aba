"""Which operators MindSpore's graph kernels fuse into kernels of DVM on Ascend (report section 4.5)."""
