"""Many hosts: `tc3 doctor` on each of them, and what sets one apart from the others."""
