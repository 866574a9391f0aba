"""Strategy search: what devices and links can do (`hardware`)."""
