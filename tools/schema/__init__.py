"""MindFormers' facts at the verified version: keys, types, defaults, converter, layer tables."""
