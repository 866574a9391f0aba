"""metadata.json of a new layout, as MindFormers 1.9.0 writes and reads it (`checkpoint/metadata.py`)."""

from __future__ import annotations

from typing import Any

from tools.checkpoint.types import TYPES
from tools.weights.reshard.plan import Move, Plan

# safetensors' types in MindSpore's words


def metadata_of(plan: Plan) -> dict[str, Any]:
    """Its whole content.

    A slice is in one file. MindFormers looks for it at its first holder, and finds the file of another by `rank_group`.
    """
    storage: dict[str, Any] = {}
    for move in plan.moves:
        for place, (rank, holders) in enumerate(zip(move.writers, move.new.holders, strict=True)):
            entry = {"file_name": plan.file(rank, move.kind), "storage_rank": rank, "rank_group": list(holders)}
            storage[str((move.name, (place,)))] = [entry]
    return {"state_dict_metadata": {move.name: _described(move) for move in plan.moves}, "storage_data": storage}


def _described(move: Move) -> dict[str, Any]:
    replicas = [0] * (max(rank for ranks in move.new.holders for rank in ranks) - move.layout.first + 1)
    for ranks in move.new.holders:
        for number, rank in enumerate(ranks):
            replicas[rank - move.layout.first] = number
    return {
        "properties": {
            "dtype": TYPES[move.dtype].name,
            "replica_id": replicas,
            "allow_shape_mismatch": False,
            "allow_to_save": True,
        },
        "global_shape": list(move.new.shape),
        "axis_fragmentations": list(move.new.cuts),
        "layout": move.layout.as_metadata(),
        "chunk": [
            {"global_offset": [place], "local_shape": list(move.new.part)} for place in range(len(move.new.holders))
        ],
    }
