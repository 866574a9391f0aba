"""Which cores each worker of a host gets: near its NPU, nobody else's, by role."""
