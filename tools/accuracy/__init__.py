"""`tc3 accuracy`: is the arithmetic of this device and version right? Operator by operator (report section 3.1)."""
