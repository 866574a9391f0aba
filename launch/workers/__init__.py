"""What runs inside worker processes."""
