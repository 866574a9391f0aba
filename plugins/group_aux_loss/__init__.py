"""The auxiliary loss of experts over the tokens of an expert-parallel group."""
