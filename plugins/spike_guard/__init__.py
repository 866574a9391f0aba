"""A run that meets a spike of its loss or gradients goes back to before it, and leaves its samples out."""
