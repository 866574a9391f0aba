"""A small TeleChat3-MoE on ranks that exist in NumPy alone: what CPU cannot execute, shard by shard.

Every rank computes on its own shards, and what goes between ranks goes through the collectives that the strategy has
on a cluster. Pipeline stages have layers of their own and know of each other what is sent, a micro-batch at a time in
1F1B order. `run.emulate` trains some steps and records every tensor on the way; the same code on one rank is the
unsharded layer, whose backward passes the tests compare with finite differences.

Left out: the auxiliary loss of the router, the move of its bias, and the MTP layer (so also the gradient of the
embedding's copy that MTP has on the last stage); embedding and head have weights of their own in this family.
"""
