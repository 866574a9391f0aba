"""Attention-aware data scheduling (report section 4.2): which rank trains which sample when, so that nobody waits."""
