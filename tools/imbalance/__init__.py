"""How unevenly a corpus loads the devices of a recipe, before any device is there."""
