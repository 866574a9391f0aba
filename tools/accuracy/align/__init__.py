"""MindFormers against an independent reference, rung by rung (report section 3.2)."""
