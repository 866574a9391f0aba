"""This module reads a file of published measurements, and converts each row to a `Configuration`. If a row of
measurements cannot be expressed as a configuration, the module keeps the reason.

The `config` block of a row has one of three kinds: explicit dimensions, the name of a public model (models.yaml), or
the files that MindFormers model cards link (`model`, `parallel`, `recompute`). Rows leave many values out. The settings
of the row's group (`publishers`) determine these values, never the row's measurement, and `assumptions` lists them.

Before a row is used, its values are checked against the values that a run can have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from plugins.errors import DataError, did_you_mean, refuse_unknown
from tools.estimate.configuration import Configuration, even_layers
from tools.estimate.efficiency import cluster
from tools.estimate.published.publishers import (
    Unexpressed,
    as_recipes_have_it,
    interleaved,
    layer_row,
    micro_batch,
    mindformers_row,
    public_model,
    recomputation,
    settings_of,
    titan_row,
)
from tools.hardware import Hardware
from tools.hardware.load import NAMES, device_in, read_yaml
from tools.model import Latent, Model, pattern_of
from tools.pipeline.schedules import schedule_of
from tools.ranges import RANGES, Range, is_number, short

# sizes by the name that rows give them; others may be any number that fits a model
_SIZES = {
    **dict.fromkeys(("layers", "num_layers"), RANGES["layers"]),
    **dict.fromkeys(("devices", "tp", "pp", "cp", "dp", "ep"), RANGES["devices"]),
    **dict.fromkeys(("gbs", "global_batch", "batch_size", "local_batch"), RANGES["global_batch_size"]),
    **dict.fromkeys(("micro_batch", "micro_batches", "micro_batch_num"), RANGES["micro_batches"]),
    **dict.fromkeys(("vpp", "pp_interleave_num"), RANGES["layers"]),
}


def _flat(keys: Any) -> tuple[str, ...]:
    """Return the keys of a list of keys and of lists."""
    return tuple(key for item in keys for key in (_flat(item) if isinstance(item, list) else (item,)))


_KEYS: dict[str, Any] = read_yaml(Path(__file__).with_name("keys.yaml"), DataError)
_ROW, _MEASURED, _CARD = (_flat(_KEYS[part]) for part in ("row", "measured", "card"))
_FORMS = {name: _flat(keys) for name, keys in _KEYS["forms"].items()}
_CONFIG = tuple(dict.fromkeys(key for keys in _FORMS.values() for key in keys))
_BLOCKS = {name: _flat(keys) for name, keys in _KEYS["blocks"].items()}
_USES = ("fit", "context_only")
_ANY = Range(0, 1e15, whole=False)
_NEGATIVE = Range(-10_000, 10_000, whole=False)


def check_row(row: Mapping[str, Any], place: str) -> None:
    """Raise an error if a row of a measurements file has a value that is not allowed.

    Raises:
        DataError: the row has no id, a block of the wrong kind, or a text in the place of a number; the message names
            the key.
    """
    if "id" not in row:
        raise DataError(f"{place}.id: the key is missing")
    if isinstance(row["id"], bool) or not isinstance(row["id"], str | int):
        raise DataError(f"{place}.id: the value must be text")
    for key in ("group", "use", "hardware"):
        if not isinstance(row.get(key, ""), str):
            raise DataError(f"{place}.{key}: the value must be text")
    for key in ("config", "measured"):
        if row.get(key) is not None and not isinstance(row[key], Mapping):
            raise DataError(f"{place}.{key}: the value must be a mapping")
    _keys(row, place)
    if row.get("use", "fit") not in _USES:
        raise DataError(
            f"{place}.use: {row['use']!r}: the value must be {' or '.join(_USES)}{did_you_mean(row['use'], [*_USES])}"
        )
    _numbers(row.get("config"), f"{place}.config", _SIZES)
    _numbers(row.get("measured"), f"{place}.measured", {})


def _keys(row: Mapping[str, Any], place: str) -> None:
    refuse_unknown(f"{place}.", row, _ROW, DataError)
    refuse_unknown(f"{place}.measured.", row.get("measured") or {}, _MEASURED, DataError)
    config = row.get("config") or {}
    card = isinstance(config.get("model"), Mapping)
    refuse_unknown(f"{place}.config.", config, _CARD if card else _CONFIG, DataError)
    form = _form(config)
    if foreign := [] if card else [key for key in config if key not in _FORMS[form]]:
        raise DataError(
            f"{place}.config.{foreign[0]}: a row that has {form} must not have this key; it may have "
            f"{', '.join(_FORMS[form])}"
        )
    if config.get("shared") and config.get("shared_ffn"):
        raise DataError(
            f"{place}.config.shared_ffn: shared ({config['shared']!r} experts as wide as moe_ffn) and shared_ffn "
            f"({config['shared_ffn']!r}) both give the width of the shared expert; write only one of them"
        )
    for block, names in _BLOCKS.items():
        if isinstance(config.get(block), Mapping):
            refuse_unknown(f"{place}.config.{block}.", config[block], names, DataError)
            for name, value in config[block].items():
                if isinstance(value, str | Mapping) and name not in _KEYS["texts"]:
                    raise DataError(
                        f"{place}.config.{block}.{name}: {value!r}: the value must be a number, a list, true or false"
                    )


def _form(config: Mapping[str, Any]) -> str:
    """Return the name of the form of a `config` that is not a model card's, as a key of `_FORMS`."""
    if isinstance(config.get("parallel"), str):
        return "torchtitan's columns"
    if "dispatcher" in config:
        return "one MoE layer"
    return "a model's name" if "model" in config else "dimensions"


def _numbers(value: Any, place: str, sizes: Mapping[str, Range], span: Range = _ANY) -> None:
    """Check every number at or below a place; zero passes, as a way to say that there is none."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _numbers(inner, f"{place}.{key}", sizes, _NEGATIVE if key == "offset" else sizes.get(key, _ANY))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _numbers(inner, f"{place}[{index}]", sizes, span)
    elif isinstance(value, int | float) and not isinstance(value, bool) and value != 0:
        if refusal := span.refusal(value):
            raise DataError(f"{place}: {short(value)} {refusal}")
    elif isinstance(value, str) and is_number(value):
        raise DataError(f"{place}: {value!r} is text, not a number: write it with a dot and a sign, such as 1.0e+3")


_DTYPES = {"bf16": "bf16", "fp16": "fp16", "unspecified": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
# what the report leaves out of its 438B run, as recipes/telechat3_438b assumes it
_TELECHAT3_438B = {"seq": 4096, "tp": 2, "ep": 16}


@dataclass(frozen=True)
class Row:
    """A `Row` is one row of a measurements file: a measured run, or the reason why the run cannot be expressed as a
    configuration. The field `samples` is the number of samples in a step, or 0 if the row does not state this number.
    If `masked` is True, the published FLOPs include the masked half of attention.
    """

    id: str
    group: str
    use: str
    cluster: str
    config: Configuration | None
    samples: int
    masked: bool
    assumptions: tuple[str, ...]
    measured: Mapping[str, Any]
    reason: str = ""

    @property
    def hardware(self) -> Hardware:
        """Return the hardware on which the row was measured."""
        return cluster(self.cluster)


def read_rows(path: Path) -> list[Row]:
    """Return all rows of a measurements file.

    Raises:
        DataError: the file cannot be read or is not a mapping with a list `rows`, or two rows have the same id.
    """
    content = read_yaml(path, DataError)
    rows = content.get("rows") if isinstance(content, dict) else content
    if not rows or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: rows: the value must be a list of measurements, each with id, hardware and config")
    if isinstance(content, dict):
        refuse_unknown(f"{path}: ", content, _KEYS["file"], DataError)
    found = [express(row, f"{path}: rows[{index}]") for index, row in enumerate(rows)]
    first: dict[str, int] = {}
    for index, row in enumerate(found):
        if first.setdefault(row.id, index) != index:
            raise DataError(f"{path}: rows[{index}].id: {row.id!r} is the id of rows[{first[row.id]}], too")
    return found


def express(row: Mapping[str, Any], place: str = "row") -> Row:
    """Return one row of a measurements file as a `Row`.

    Raises:
        DataError: the row has no id, or one of its values has the wrong kind.
    """
    check_row(row, place)
    group, hardware = str(row.get("group", "")), str(row.get("hardware", ""))
    known = device_in(hardware)
    measured = row.get("measured") or {}
    common = (str(row["id"]), group, str(row.get("use", "fit")), known)
    try:
        if not known:
            named = did_you_mean(hardware.lower(), list(NAMES))
            raise Unexpressed(f"no hardware is known for {hardware!r}{named}; known are {', '.join(NAMES)}")
        config, samples, assumed = _configuration(row.get("config"), group, known)
        if group == "megatron_bridge":
            config = as_recipes_have_it(str(row["id"]), known, config, assumed)
        _require_whole(config, config.model, config.model.latent)
        _require_layout(config, row["config"], samples)
    except Unexpressed as error:
        return Row(*common, None, 0, False, (), measured, str(error))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"config: {type(error).__name__}: {error}"
        return Row(*common, None, 0, False, (), measured, reason)
    return Row(*common, config, samples, settings_of(group, known).masked, tuple(assumed), measured)


def _configuration(config: Any, group: str, known: str) -> tuple[Configuration, int, list[str]]:
    if not isinstance(config, dict) or not config:
        raise Unexpressed("the row has no configuration")
    if isinstance(config.get("model"), dict):
        return mindformers_row(config)
    form = _form(config)
    if form == "torchtitan's columns":
        return titan_row(config)
    if form == "one MoE layer":
        return layer_row(config)
    assumed: list[str] = []
    if group == "ascend_reports" and config.get("params") == "438B":
        config = {**config, **{key: config.get(key) or value for key, value in _TELECHAT3_438B.items()}}
        assumed.append("sequence 4,096, tp 2, ep 16 and MLA ranks as in recipes/telechat3_438b")
    return _layout(config, group, known, assumed)


def _require_whole(*parts: Any) -> None:
    """Refuse sizes that are not whole numbers: text and lists pass the arithmetic above, and fail in an estimate."""
    for part in filter(None, parts):
        for size in fields(part):
            if size.type == "int" and type(value := getattr(part, size.name)) is not int:
                raise Unexpressed(f"{size.name} is {value!r}, which is not a whole number")


def _require_layout(made: Configuration, written: Mapping[str, Any], samples: int) -> None:
    """Refuse degrees that divide nothing whole: divisions round them away, and another run would be predicted."""
    model, devices = made.model, written.get("devices")
    if not made.layer_only and model.heads % made.tp:
        raise Unexpressed(f"tp {made.tp} does not divide {model.heads} heads")
    if model.experts and not (0 < model.top_k <= model.experts and model.expert_ffn > 0):
        raise Unexpressed(f"a token has {model.top_k} of {model.experts} experts of width {model.expert_ffn}")
    if model.experts and model.experts % made.ep:
        raise Unexpressed(f"ep {made.ep} does not divide {model.experts} experts")
    if not made.layer_only and not model.latent and model.heads % model.kv_heads:
        raise Unexpressed(f"kv_heads {model.kv_heads} does not divide {model.heads} heads")
    if model.layers + 2 < made.pp * made.chunks:  # Megatron may place embedding and head like layers
        chunks = f"pp {made.pp} x vpp {made.chunks} are more chunks"
        raise Unexpressed(f"{chunks} than {model.layers} layers, embedding and head")
    if devices and not made.layer_only and devices != made.devices:
        layout = f"dp {made.dp} x tp {made.tp} x pp {made.pp} x cp {made.cp}"
        raise Unexpressed(f"{layout} is {made.devices} devices, and the row has {devices}")
    if "gbs" in written and samples != made.global_batch:
        parts = f"dp {made.dp} x micro-batches of {made.batch}"
        raise Unexpressed(f"gbs {samples} is not a multiple of {parts}")


def _need(config: Mapping[str, Any], *names: str) -> None:
    missing = [name for name in names if not isinstance(config.get(name), int)]
    if missing:
        raise Unexpressed(f"not given: {', '.join(missing)}")


def _layout(
    config: Mapping[str, Any], group: str, known: str, assumed: list[str]
) -> tuple[Configuration, int, list[str]]:
    """Return dimensions or a model's name, with tp, pp, ... beside them."""
    own: tuple[str, ...] = () if "model" in config else ("layers", "hidden", "heads", "vocab")
    own += ("topk", "moe_ffn") if own and config.get("experts") else ()
    _need(config, *own, "seq", "gbs", "devices", "tp", "pp")
    model = public_model(str(config["model"])) if "model" in config else _dimensions(config, group)
    settings = settings_of(group, known)
    tp, pp, cp = config["tp"], config["pp"], config.get("cp") or 1
    dp = config.get("dp") or config["devices"] // (tp * pp * cp)
    if not dp:
        raise Unexpressed(f"tp {tp} x pp {pp} x cp {cp} is more than {config['devices']} devices")
    batch = config.get("micro_batch") or micro_batch(config["gbs"] // dp, pp, config.get("micro_batches"), assumed)
    micro_batches = max(1, config["gbs"] // max(1, dp * batch))
    chunks = config.get("vpp") or 1
    if not config.get("vpp") and settings.interleaved:
        chunks = interleaved(model.layers, pp, micro_batches, assumed)
    if settings.schedule == "zero_bubble_v" and pp > 1:
        chunks = 2
    layers = even_layers(model.layers, pp, chunks, model.mtp)
    if settings.schedule == "zero_bubble_v" and pp > 1:
        layers = (layers[0], layers[1][::-1])
    schedule = settings.schedule or schedule_of("1f1b", chunks if pp > 1 else 1)
    words = str(config.get("recompute") or settings.recompute)
    precision = str(config.get("precision") or settings.precision).lower()
    if precision == "unspecified":
        assumed.append("precision fp8, which the other rows of this series have")
    sequence_parallel = "no_sp" not in words and ("sp" in words.split("_") or settings.sequence_parallel)
    made = Configuration(
        model=replace(model, dropout=settings.dropout),
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=_degree(config.get("ep")),
        layers=layers,
        schedule=schedule,
        sequence=config["seq"],
        batch=batch,
        micro_batches=micro_batches,
        dtype=_DTYPES.get(precision, "fp8" if "fp8" in precision else "bf16"),
        recompute=recomputation(words, layers, settings.selective),
        sequence_parallel=sequence_parallel,
        ep_mode=settings.ep_mode,
        shard_optimizer=settings.shard_optimizer,
        shard_gradients=settings.shard_gradients or bool(config.get("fsdp")),
        shard_weights=bool(config.get("fsdp")),
        wide_gradients=settings.wide_gradients,
        flash=settings.flash,
        shared_whole=settings.mindformers,
        keep_gathered=settings.mindformers,
        fp32_residual=settings.mindformers,
        overlap_tp=settings.overlap,
        overlap_dp=settings.overlap or settings.mindformers,
        overlap_pp=settings.overlap,
        overlap_tp_backward=settings.overlap_tp_backward,
        overlap_ep=settings.overlap_ep or (settings.overlap and chunks > 1),
        logit_bytes=settings.logit_bytes,
        spare_gradients=settings.spare_gradients,
        cp_exchanges_heads=settings.cp_exchanges_heads,
    )
    return made, config["gbs"], assumed


def _degree(value: Any) -> int:
    """Return `ep` as a number; reports write it in words, too ("TP8xEP4=32 groups")."""
    if isinstance(value, str):
        found = re.search(r"=(\d+)", value) or re.search(r"(\d+)", value)
        return int(found[1]) if found else 1
    return value or 1


def _dimensions(config: Mapping[str, Any], group: str) -> Model:
    h, settings = config["hidden"], settings_of(group, "")
    ffn = config.get("dense_ffn") or config.get("ffn")
    experts = config.get("experts") or 0
    latent = None
    if "mla" in config or str(config.get("attention", "")).startswith("MLA"):
        ranks = config.get("mla") or {"q_lora": 1536, "kv_lora": 512, "nope": 128, "rope": 64, "v": 128}
        latent = Latent(ranks["q_lora"], ranks["kv_lora"], ranks["nope"], ranks["rope"], ranks["v"])
    shared = config.get("shared") or 0
    return Model(
        pattern=pattern_of(config["layers"], experts, config.get("dense_layers", 1)),
        hidden=h,
        heads=config["heads"],
        kv_heads=config.get("kv_heads") or config["heads"],
        head_dim=config.get("head_dim") or h // config["heads"],
        ffn=ffn if isinstance(ffn, int) else (3 if experts else 4) * h,
        vocab=config["vocab"],
        gated=bool(config.get("gated", experts or config.get("kv_heads"))),
        tied=settings.tied,
        latent=latent,
        experts=experts,
        top_k=config.get("topk") or 0,
        expert_ffn=config.get("moe_ffn") or 0,
        shared_ffn=config.get("shared_ffn") or shared * (config.get("moe_ffn") or 0),
        mtp=config.get("mtp") or 0,
        node_limit=settings.node_limit,
    )
