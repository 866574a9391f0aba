"""MindSpore's sharded graph of an Ascend cluster, executed by CPU processes.

The front end of MindSpore compiles for Ascend with the real ranks; a small C++ library (`csrc/`) then turns the graph
into one for CPU, in which NumPy computes every operator that MindSpore has no CPU kernel of.
"""
