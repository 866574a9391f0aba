"""Going on with a run: which checkpoint, the same model, the same data in the same order."""
