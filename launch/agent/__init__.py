"""`tc3 agent`: the agents of a run's nodes meet on the shared disk, see failures, and go on."""
