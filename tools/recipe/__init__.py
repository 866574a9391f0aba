"""Recipes as data: read them the way MindFormers does, override them safely, write them flat."""
