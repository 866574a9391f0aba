"""What workers on CPU send each other besides MindSpore's own collectives: tokens to experts and back, over TCP."""
