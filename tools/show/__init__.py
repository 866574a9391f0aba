"""Recipes to look at: one as it will run, two compared."""
