"""A small TeleChat3-MoE on ranks that exist in NumPy alone: what CPU cannot execute, shard by shard.

Every rank computes on its own shards, and what goes between ranks goes through the collectives that the strategy has
on a cluster. `run.emulate` trains some steps and records every tensor on the way; the same code on one rank is the
unsharded layer, whose backward passes the tests compare with finite differences.

Left out: the auxiliary loss of the router and the MTP layer.
"""
