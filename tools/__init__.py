"""The tools of this package run before a training and without a device."""
