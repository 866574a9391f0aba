"""Layers to pipeline stages and what each recomputes: the pipeline optimiser."""
