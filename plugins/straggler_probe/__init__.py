"""Which ranks slow a run down: step times do not tell, for the slowest rank's is everybody's."""
