"""Small workers wait for each other in the code of this package, so that the path in their stacks contains
`mindspore`, as it does when workers wait in MindSpore.
"""
