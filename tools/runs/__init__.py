"""What a run wrote: its steps, and the attempts that it took to make them."""
