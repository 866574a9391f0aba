"""What a host says of itself, read below a root folder, so that recorded hosts stand in for real ones."""
