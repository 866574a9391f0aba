"""Which layer runs on which pipeline stage and chunk, written as in Megatron-Core; `tools.layout` resolves it.

`model.model_config.offset` may hold a Megatron layout string or `auto`. Both become MindFormers' own offset (and, for
`auto`, recompute) tables before MindFormers sees the recipe (`tools.layout.offsets`), so there is no adapter:
nothing of this runs inside MindFormers.
"""
