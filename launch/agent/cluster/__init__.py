"""Jobs of cluster managers that start an agent on each node: text for Slurm, and for Volcano on Kubernetes."""
