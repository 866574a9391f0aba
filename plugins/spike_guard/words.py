"""By which words of a run's end a launch knows that it was for a spike, and whether it is to go on."""

SPIKE = "spike: "  # begins the reason
NO_MORE = "goes back no more (plugins.spike_guard.rollbacks)"  # is in the reason of a run that is given up
