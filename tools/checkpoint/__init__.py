"""What a checkpoint folder holds."""
