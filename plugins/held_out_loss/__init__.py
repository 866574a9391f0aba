"""The training loss on documents that are never trained on."""
