"""What a step takes: the columns of the recipe's loader with shape and type, as one rank reads them."""

from __future__ import annotations

from plugins.errors import RecipeError
from tools.check.arithmetic import columns_of
from tools.recipe.view import View
from tools.schema.defaults import model_number


def shapes_of(view: View) -> dict[str, tuple[tuple[int, ...], str]]:
    """Column -> (shape, NumPy type) of what one rank reads for one step, in the order of the arguments.

    All micro-batches of the step come at once: the first dimension is batch size x micro-batches x accumulated steps,
    and with full_batch those of all data-parallel ranks.

    Raises:
        RecipeError: a column of which the shape is not known here.
    """
    batch = view.batch * view.micro_batches * view.accumulation * (view.dp if view.full_batch else 1)
    length = model_number(view, "seq_length")
    tokens = ((batch, length), "int32")
    known = {
        "input_ids": tokens,
        "labels": tokens,
        "loss_mask": ((batch, length), "float32"),
        "position_ids": tokens,
        "attention_mask": ((batch, 1, length, length), "uint8"),
        "actual_seq_len": ((batch, view.mask_documents), "int32"),
    }
    columns = view.get(("train_dataset", "input_columns")) or columns_of(view)
    unknown = [name for name in columns if name not in known]
    if unknown:
        raise RecipeError(f"train_dataset.input_columns: no shape is known for {unknown}; known are {sorted(known)}")
    return {name: known[name] for name in columns}
