"""Pre-flight tools: they run without a device."""
