"""Memory of a device without compiling: by stage, over a step, and what would make it less."""
