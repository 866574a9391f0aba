"""One rank compiled for a virtual cluster, in a process of its own."""
