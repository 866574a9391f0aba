"""Keep how MindFormers laid out the checkpoint of a run: what `tools.weights.reshard_target` must say of its recipe.

    python -m tests.tools.weights.freeze RECIPE ITERATION [RECIPE ITERATION ...] \
        > tests/tools/weights/frozen/layouts.json

Moments lie as their weights, which is looked at here; gradients that add up over micro-batches are never saved.
"""

import json
import sys
from pathlib import Path

from plugins.sealed_checkpoint.router_state import ADAM
from tools.checkpoint.stored import BUFFERS, METADATA


def layouts(folder):
    """name -> [shape, cuts, ranks by slice] of all tensors of a checkpoint but moments."""
    content = json.loads((folder / METADATA).read_text())
    storage, found = content["storage_data"], {}
    for name, tensor in content["state_dict_metadata"].items():
        if name.startswith(BUFFERS):
            continue
        places = sorted(chunk["global_offset"][0] for chunk in tensor["chunk"])
        ranks = [sorted(entry["storage_rank"] for entry in storage[str((name, (place,)))]) for place in places]
        found[name] = [tensor["global_shape"], tensor["axis_fragmentations"], ranks]
    for name in [name for name in found if name.startswith(ADAM)]:
        assert found.pop(name) == found[name.partition(".")[2]], f"{name} lies otherwise than its weight"
    return found


if __name__ == "__main__":
    given = sys.argv[1:]
    pairs = zip(given[::2], given[1::2], strict=True)
    rows = [f'"{recipe}": {json.dumps(layouts(Path(folder)))}' for recipe, folder in pairs]
    print("{" + ",\n".join(rows) + "}")
