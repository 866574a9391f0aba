"""Which operators of a graph MindSpore's passes would fuse into kernels of DVM, without a device (report section 4.5).

Two steps, as in MindSpore: `cluster` finds convex sets of operators that DVM takes, `split` cuts each into kernels.
"""
