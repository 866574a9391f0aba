"""MindSpore's sharded training graph, made for Ascend, executed by processes on CPU."""
