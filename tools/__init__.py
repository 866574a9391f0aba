"""This package holds the commands of `tc3` that check, predict and compare trainings; most of them need no device."""
