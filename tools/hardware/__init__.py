"""This package describes the speeds and sizes of devices and links. Each cluster has one YAML file, which states the
source of every number and how certain the number is.
"""

from tools.hardware.load import Hardware, Link, Origin, known_hardware, load_hardware

DEFAULT_HARDWARE = "atlas_800t_a2"  # the cluster where nobody names one

__all__ = ["DEFAULT_HARDWARE", "Hardware", "Link", "Origin", "known_hardware", "load_hardware"]
