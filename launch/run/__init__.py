"""`tc3 train`: from a recipe to supervised workers and their readings."""
