"""Files that commands leave behind: whole or not there, and pictures that are the same for the same numbers."""
