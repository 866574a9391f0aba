"""Where small workers wait for each other: in a file whose path says so, as MindSpore's do."""
