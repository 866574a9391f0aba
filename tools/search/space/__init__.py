"""Which parallel strategies are legal, and within what was asked."""
