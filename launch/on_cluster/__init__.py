"""A launch as a script for many nodes, and what its workers agree on."""
