"""`tc3 check`: prove without a device that a recipe is one that MindFormers will run as it is written."""
