"""Rules of a layer: the heads of its attention, the balance of its experts."""
