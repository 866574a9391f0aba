"""What MindFormers 1.9.0 needs to train on CPU, by its own hooks. See `adapter.enable`.

Importing this package imports nothing else: on Ascend no module of it is loaded.
"""
