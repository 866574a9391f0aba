"""A recipe under every parallel strategy against one device."""
