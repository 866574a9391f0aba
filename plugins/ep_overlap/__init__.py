"""Expert-parallel communication beside computation: a micro-batch's tokens in chunks (report section 4.4)."""
