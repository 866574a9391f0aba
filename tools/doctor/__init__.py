"""Is this host fit to train: small checks of what it says of itself, with the command that mends what is not."""
