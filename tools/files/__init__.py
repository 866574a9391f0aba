"""Files that commands leave behind, whole or not there; pictures alike for the same numbers; the ends of logs."""
