"""Whether fused kernels compute what their operators compute one by one (report, sections 3.1 and 4.5)."""
