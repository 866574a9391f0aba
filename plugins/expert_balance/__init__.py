"""Experts change devices during training, so that no device waits long for the fullest one (report section 2)."""
