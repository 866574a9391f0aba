"""The part of the plugin that MindSpore compiles: dispatch, experts and combine as cells of the model."""
