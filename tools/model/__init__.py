"""What a recipe is as a model: its layers, weights and FLOPs. The only formulas of them in this repository."""
