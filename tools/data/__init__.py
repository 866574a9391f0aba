"""Corpus in, Megatron `.bin/.idx` out: `tc3 data prepare` and `tc3 data verify`."""
