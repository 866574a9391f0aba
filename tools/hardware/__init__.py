"""What devices and links can do: one YAML a cluster, every number with its source and certainty."""

from tools.hardware.load import Hardware, Link, Origin, known_hardware, load_hardware

__all__ = ["Hardware", "Link", "Origin", "known_hardware", "load_hardware"]
