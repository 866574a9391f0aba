"""What a sample is made of and what it costs: documents, pairs of tokens that attend, from Megatron's index alone."""
