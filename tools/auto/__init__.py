"""What `auto` of a recipe stands for."""
