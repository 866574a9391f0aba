"""What a compiled graph says: its operators, collectives, FLOPs and activations."""
