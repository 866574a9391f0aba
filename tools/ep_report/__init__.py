"""`tc3 ep-report`: what expert parallelism costs on a topology, and which dispatch and overlap settings fit it."""
