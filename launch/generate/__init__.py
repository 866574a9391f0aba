"""`tc3 generate`: text from a trained mini, by the forward graph that trains."""
