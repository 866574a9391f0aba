"""Published measurements: read as runs, predicted, used to fit a device."""
