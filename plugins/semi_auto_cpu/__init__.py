"""MindSpore's sharded graph (semi-auto parallel, pipelines included), executed by CPU processes: docs/semi-auto-cpu.md.

Importing this package imports nothing else.
"""
