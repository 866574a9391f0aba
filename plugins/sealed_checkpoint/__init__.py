"""Checkpoints that a reader can tell are whole."""
