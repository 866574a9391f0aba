"""Whether the collectives that a sharded run executes are those that its dry run reports."""
