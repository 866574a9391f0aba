"""Records in which one value is replaced: each key of a record, with each wrong type."""

import json

WRONG = (None, True, -1, 1.5, 10**400, "text", [None], {})


def places(value, path=()):
    """The path of each value in a JSON value; of a long object or list only the first item."""
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for place, (key, child) in enumerate(children):
        if place == 0 or not path or isinstance(child, list) != isinstance(value, list):
            yield from places(child, (*path, key))


def kind_of(value):
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "number"
    return type(value).__name__


def corrupted(line, path, wrong):
    """The text of a line with one value replaced, and the value that stood there."""
    record = inside = json.loads(line)
    for key in path[:-1]:
        inside = inside[key]
    right, inside[path[-1]] = inside[path[-1]], wrong
    return json.dumps(record) + "\n", right


def without(line, path):
    """The text of a line without one of its keys; None if the path ends in a list."""
    record = inside = json.loads(line)
    for key in path[:-1]:
        inside = inside[key]
    if isinstance(inside, list):
        return None
    del inside[path[-1]]
    return json.dumps(record) + "\n"
