"""The gradient of grouped experts' weights added to its float32 sum by one operator (report section 4.5)."""
