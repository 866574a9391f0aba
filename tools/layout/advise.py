"""This module finds which dispatch mode and how many chunks a recipe should use on a cluster, and predicts the cost of
each mode.

The module computes predictions of `tools.estimate` from a recipe and a hardware file, without side effects. `tc3
ep-report` prints these predictions; if `plugins.hierarchical_ep` or `plugins.ep_overlap` has the value `auto`, the
fastest mode and the fastest chunks replace this value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from plugins.edited_classes import ARCHITECTURES, can_edit
from plugins.ep_overlap import plan as ep_overlap
from plugins.ep_overlap.plan import DIGITS, Choice, Chunks
from plugins.errors import RecipeError, did_you_mean
from plugins.hierarchical_ep import settings as hierarchical_ep
from plugins.hierarchical_ep.plan import MODES
from plugins.hierarchical_ep.topology import DEVICES_PER_NODE, Topology, degrees_of, nearest, of_mesh
from plugins.hierarchical_ep.traffic import BreakEven, backward, break_even, check_routing
from tools.estimate.configuration import Configuration, Cut
from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.layer_time import limited_share
from tools.estimate.loads import EVEN, Loads, loads_of
from tools.estimate.time_model import StepTime, TimeModel
from tools.hardware import DEFAULT_HARDWARE, Hardware, load_hardware
from tools.layout.offsets import Values, even_layout
from tools.model import MOE, model_of
from tools.recipe.findings import in_file, refusal
from tools.recipe.load import Recipe, dotted
from tools.recipe.view import AUTO, CHUNKS, DISPATCH, MODE, MODEL, OVERLAP, PARALLEL, View, look
from tools.schema.converter import convert
from tools.schema.schema import load_schema


def check(recipe: Recipe, hardware: Hardware) -> None:
    """Raise an error if a recipe has no expert-parallel communication, or if its layout does not fit the cluster.

    Raises:
        RecipeError: the recipe has no experts or no expert parallelism, its degrees do not divide each other, or its
            nodes have another size than the cluster's.
    """
    view = View(recipe)
    built = convert(view, load_schema())
    try:
        model = model_of(built.fields)
    except (KeyError, TypeError, ValueError) as error:
        raise refusal(recipe, MODEL, f"its sizes do not make a model ({error}); `tc3 check` says more") from None
    experts, path = model.experts, (*PARALLEL, "expert_parallel")
    if MOE not in model.pattern:
        raise refusal(
            recipe, (*MODEL, "n_routed_experts"), "the model has no routed experts, so there is nothing to report"
        )
    if not view.flag(("use_parallel",)):
        raise refusal(recipe, ("use_parallel",), "a single device has nobody to send tokens to; set the key to True")
    node = hardware.devices_per_node
    if (written := built.number("npu_nums_per_device", DEVICES_PER_NODE)) != node:
        text = f"{written}, but a node of {hardware.name} has {node} devices; set it to that"
        raise refusal(recipe, (*MODEL, "npu_nums_per_device"), f"{text}, or pass another --cluster")
    ranks = view.dp * view.tp
    able = degrees_of(node, experts, ranks)
    none = f"no degree above 1 fits {experts} experts, nodes of {node} devices and data_parallel x model_parallel"
    none = f"{none} = {view.dp} x {view.tp}; give more ranks or experts"
    if view.ep == 1:
        right = f"try --ep {max(degree for degree in able if degree in (*range(17), able[0]))}" if able else none
        raise refusal(recipe, path, f"a degree of 1 sends no token anywhere; {right}")
    if experts % view.ep:
        right = f"use a divisor, for instance {nearest(view.ep, able)}" if able else none
        raise refusal(recipe, path, f"{view.ep} does not divide {experts} experts; {right}")
    try:
        if view.get(DISPATCH):
            of_mesh(view.ep, node, experts, ranks)
    except RecipeError as error:
        raise in_file(recipe, error) from None
    if ranks % view.ep:
        dp = math.lcm(view.ep, view.tp) // view.tp
        other = f"{nearest(view.ep, able)}, or " if able else ""
        text = f"{view.ep} does not divide data_parallel x model_parallel = {view.dp} x {view.tp}"
        raise refusal(recipe, path, f"{text}; use {other}data_parallel: {-(-view.dp // dp) * dp}")
    if built.number("seq_length") % (view.tp * view.cp):
        text = f"{built.number('seq_length')} tokens cannot be divided over tp {view.tp} x cp {view.cp}"
        raise refusal(recipe, (*MODEL, "seq_length"), text)


def choices(recipe: Recipe, hardware: Hardware) -> tuple[Sequence[str], Sequence[Chunks]]:
    """Return the dispatch modes and the numbers of chunks that a recipe could set on `hardware`, as arguments of
    `advise`. If `plugins.hierarchical_ep` cannot modify the model's class, only MindFormers' own dispatchers are
    possible, and a micro-batch cannot be cut into chunks. MindFormers' hierarchical dispatcher also needs EP groups
    that consist of whole nodes. For EP groups that straddle nodes, only the global All-to-All is possible.
    """
    if pluggable(recipe) and not straddles(View(recipe).ep, hardware):
        return MODES, ()
    whole = View(recipe).ep % hardware.devices_per_node == 0
    return [mode for mode in hierarchical_ep.DISPATCHER_OF if whole or mode == "global"], [(1, 1)]


def straddles(ep: int, hardware: Hardware) -> bool:
    """Return whether EP groups of `ep` ranks neither cover whole nodes nor divide a node, so that some lie across the
    border of two nodes.
    """
    return ep % hardware.devices_per_node != 0 and hardware.devices_per_node % ep != 0


def pluggable(recipe: Recipe) -> bool:
    """Return whether `plugins.hierarchical_ep` can change the recipe's model; CPU workers have classes of their own."""
    return View(recipe).cpu_classes or can_edit(look(recipe, (*MODEL, "architectures")))


@dataclass(frozen=True)
class ModeReport:
    """A `ModeReport` holds the predicted cost of one dispatch mode: the bytes that the busiest rank sends for one MoE
    layer and micro-batch, and the seconds of a step.
    """

    mode: str
    inter_bytes: float  # over each class of links, forward and backward, with what recomputation repeats
    intra_bytes: float
    ep_seconds: float  # EP communication of the slowest stage in a step, hidden or not
    choice: Choice  # the best cut of the layer, see `plugins.ep_overlap.plan`
    whole: StepTime = field(repr=False)  # the step without overlap
    cut: StepTime = field(repr=False)  # and with it

    @property
    def step(self) -> tuple[float, float]:
        """Return the predicted seconds of a step with this dispatch mode, once without and once with overlap of EP
        communication.
        """
        return self.whole.total, self.cut.total

    @property
    def exposed(self) -> tuple[float, float]:
        """Return the seconds of EP communication in a step that computation does not hide, once without and once with
        overlap.
        """
        return self.whole.by_part["ep"], self.cut.by_part["ep"]

    @property
    def share_of_step(self) -> tuple[float, float]:
        """Return exposed EP communication as a share of the step time (including the pipeline bubble), once without and
        once with overlap.
        """
        return self.exposed[0] / self.step[0], self.exposed[1] / self.step[1]

    @property
    def share_of_communication(self) -> tuple[float, float]:
        """Return the exposed EP communication as a share of all exposed communication (TeleChat3-MoE report, section
        4.4).
        """
        return self.exposed[0] / self.whole.exposed, self.exposed[1] / self.cut.exposed


@dataclass(frozen=True)
class Written:
    """A `Written` holds the dispatch mode and the chunks that a recipe sets, with the best values in place of `auto`. A
    `Written` also holds the run's configuration and predicted step with these values.
    """

    config: Configuration = field(repr=False)
    mode: str
    chunks: Chunks
    stride: int
    step: StepTime

    @property
    def words(self) -> str:
        """Return the dispatch mode, the chunks and the step time as one line: ``hierarchical, chunks [1, 2]: 35.70 s
        per step``.
        """
        chunks = f", chunks {list(self.chunks)}" if self.chunks != (1, 1) else ""
        return f"{self.mode}{chunks}: {self.step.total:.2f} s per step"


@dataclass(frozen=True)
class Advice:
    """An `Advice` holds the predicted costs of all dispatch modes for one recipe, and the recommendation."""

    recipe: Recipe = field(repr=False)
    config: Configuration  # the run, dispatched globally and uncut; its skew is the mean of the loads
    loads: Loads
    hardware: Hardware
    topology: Topology
    modes: dict[str, ModeReport]  # by dispatch mode
    mode: str  # the recommendation
    chunks: Chunks  # (1, 1) means no overlap
    stride: int  # the order of issue
    break_even: BreakEven
    why: str  # one sentence
    as_1f1b: str = ""  # why the pipeline is taken as 1F1B, where it is not the recipe's own schedule
    planned: bool = False  # the layout stands for `offset: auto`; an open dispatch is decided for an even one then
    other_ep: int | None = None  # the EP degree, if it is not that of the file

    @cached_property
    def written(self) -> Written:
        """Return the dispatch mode and the chunks that the recipe sets, with the best values in place of `auto`."""
        modes, cuts, stride = left_open(self.recipe)
        if len(modes) == 1 and cuts:
            own = replace(from_recipe(self.recipe), skew=self.skew)
            chunks, order = own.ep_cut or Cut((1, 1), 1)
            step = step_under(TimeModel(self.hardware), own, self.loads)
            return Written(own, own.ep_mode, chunks or (1, 1), order or 1, step)
        decided_for = even_layout(self.recipe) if self.planned else self.recipe
        found = advise(decided_for, self.hardware, self.loads, modes, cuts, stride)
        own = replace(self.config, ep_mode=found.mode, ep_cut=Cut(found.chunks, found.stride))
        step = step_under(TimeModel(self.hardware), own, self.loads)
        return Written(own, found.mode, found.chunks, found.stride, step)

    @property
    def skew(self) -> float:
        """Return the ratio of the busiest rank's load to the mean load, averaged over the given loads."""
        return self.config.skew

    @property
    def best(self) -> ModeReport:
        """Return the recommended dispatch mode."""
        return self.modes[self.mode]

    @property
    def settings(self) -> dict[str, Any]:
        """Return the recommended `plugins:` section, without settings that would have no effect or that the plugins
        refuse for the class of the recipe's model. Chunks or an order of issue that the recipe has are replaced, too.
        """
        if not pluggable(self.recipe) or straddles(self.topology.ep, self.hardware):
            return {}
        settings: dict[str, Any] = {"hierarchical_ep": {"mode": self.mode}}
        if self.chunks != (1, 1):
            settings["ep_overlap"] = {"chunks": list(self.chunks)}
            if not self.stride == look(self.recipe, _STRIDE, 1) == 1:
                settings["ep_overlap"]["stride"] = self.stride
        elif look(self.recipe, OVERLAP):
            settings["ep_overlap"] = False
        return settings

    @property
    def overlay(self) -> dict[str, Any]:
        """Return the keys of a child recipe with the recommended settings. If the recipe sets another token dispatcher,
        the keys also set MindFormers' default dispatcher, which `plugins.hierarchical_ep` needs, or the dispatcher of
        the recommended mode if the plugin cannot change the model.
        """
        dispatcher, usual = (*MODEL, "moe_token_dispatcher_type"), hierarchical_ep.DEFAULT_DISPATCHER
        keys: dict[str, Any] = {"parallel_config": {"expert_parallel": self.other_ep}} if self.other_ep else {}
        settings = self.settings
        right = usual if settings else hierarchical_ep.DISPATCHER_OF[self.mode]
        if look(self.recipe, dispatcher, usual) != right:
            keys["model"] = {"model_config": {dispatcher[-1]: right}}
        return {**keys, "plugins": settings} if settings else keys


def advise(
    recipe: dict[str, Any],
    hardware: Hardware | str = DEFAULT_HARDWARE,
    loads: Loads | str = EVEN,
    modes: Sequence[str] = MODES,
    cuts: Sequence[Chunks] = (),
    stride: int | None = None,
    planned: bool = False,
) -> Advice:
    """Compare dispatch modes and numbers of chunks for `recipe` on `hardware`.

    Args:
        recipe: a loaded recipe.
        hardware: a loaded hardware file, or its name or path.
        loads: the loads of the devices, or the text of `--loads` (`tools.estimate.loads.loads_of`). Step times include
            waiting for the fullest device of each layer; bytes and the choice of chunks are computed for the average
            max/mean.
        modes: the dispatch modes to choose from; only one mode if the recipe sets it.
        cuts: the pairs (parts of the batch, parts of a sequence) to choose from; [(1, 1)] if the recipe does not
            overlap EP communication, empty for all pairs that divide batch and sequence.
        stride: the order in which the steps of chunks are issued, if the recipe sets an order; by default the fastest
            order is chosen.
        planned: whether the layout of the recipe has taken the place of `offset: auto`.

    Raises:
        RecipeError: there is no expert-parallel communication, sizes do not fit each other, or an argument is wrong.
    """
    hardware = hardware if isinstance(hardware, Hardware) else cluster(hardware)
    for mode in modes:
        if mode not in MODES:
            hint = did_you_mean(mode, list(MODES))
            raise RecipeError(
                f"plugins.hierarchical_ep.mode: {mode!r} is not a mode; write one of auto, {', '.join(MODES)}{hint}"
            )
    recipe = recipe if isinstance(recipe, Recipe) else Recipe(recipe)
    check(recipe, hardware)
    # dispatch modes compare alike whether frozen weights have gradients or not, and `auto` needs only the best
    config = replace(from_recipe(recipe, ep_mode="global"), adapters=None)
    loads = loads if isinstance(loads, Loads) else loads_of(loads, config)
    config, skew = replace(config, skew=loads.typical), loads.typical
    model = config.model
    times, node = TimeModel(hardware), hardware.devices_per_node
    if across := straddles(config.ep, hardware):
        nodes = times.nodes(config)
        topology = Topology(nodes, config.ep // nodes, model.experts)
        modes, cuts = MODES[:1], [(1, 1)]
    else:
        topology = of_mesh(config.ep, node, model.experts)
    check_routing(topology, model.top_k, skew)
    reports = {mode: _report(times, config, loads, mode, cuts, stride) for mode in modes}
    # min keeps the first of equals: the simplest mode
    best = min(reports.values(), key=lambda report: round(report.step[1], DIGITS))
    even = break_even(topology, model.top_k, model.hidden, 4 if config.dtype == "fp32" else 2, skew)
    rows = limited_share(model, topology.nodes) * even.deduplicated_over_hierarchical
    even = replace(even, deduplicated_over_hierarchical=rows)
    why, unsimulated = _why(best, topology, even, skew, model.top_k, pluggable(recipe)), ""
    why = _why_global(config, node) if across else why
    try:
        times.step(config, simulated=True)
    except RecipeError as error:
        unsimulated = str(error)
    of_best = (best.mode, best.choice.chunks, best.choice.stride)
    return Advice(recipe, config, loads, hardware, topology, reports, *of_best, even, why, unsimulated, planned)


def left_open(recipe: Recipe) -> tuple[Sequence[str], Sequence[Chunks], int | None]:
    """Return the dispatch modes, numbers of chunks and orders of chunks from which the tools may choose for a recipe
    with `auto`, as arguments of `advise`. If the recipe names a dispatch mode, only this mode is returned.

    Raises:
        RecipeError: the recipe's settings are not allowed.
    """
    plugins = recipe.get("plugins") or {}
    dispatch, overlap = plugins.get("hierarchical_ep"), plugins.get("ep_overlap")
    if not dispatch:
        return ("",), [(1, 1)], 1
    hierarchical_ep.Settings.read(dispatch)
    modes = MODES if dispatch["mode"] == "auto" else (dispatch["mode"],)
    if not overlap:
        return modes, [(1, 1)], 1
    chunks, stride = ep_overlap.read(overlap)
    return (modes, [], overlap.get("stride")) if chunks == "auto" else (modes, [chunks], stride)


def _report(
    times: TimeModel, config: Configuration, loads: Loads, mode: str, cuts: Sequence[Chunks], stride: int | None
) -> ModeReport:
    """Return the report on one dispatch mode, with its best number of chunks."""
    config = replace(config, ep_mode=mode)
    choice = times.plan(config, cuts, stride)
    cut = replace(config, ep_cut=Cut(choice.chunks, choice.stride))
    forward = times.exchanges(config)
    sent = [*forward, *backward(forward)]
    if config.recompute.full:
        sent += times.repeated(config)
    whole = step_under(times, config, loads)
    alone = step_under(times, replace(config, shared_beside=False), loads) if config.shared_beside else whole
    inter, intra = (sum(getattr(step, name) for step in sent) for name in ("inter_bytes", "intra_bytes"))
    return ModeReport(mode, inter, intra, alone.by_part["ep"], choice, whole, step_under(times, cut, loads))


def step_under(times: TimeModel, config: Configuration, loads: Loads = EVEN) -> StepTime:
    """Return the predicted step under given expert loads, from a simulation of the recipe's pipeline schedule. If the
    schedule cannot be simulated, 1F1B is simulated instead, which suffices to compare dispatch modes.
    """
    try:
        return times.under(config, loads, simulated=True)
    except RecipeError:
        return times.under(replace(config, schedule="1f1b"), loads)


def _why(best: ModeReport, topology: Topology, even: BreakEven, skew: float, top_k: int, pluggable: bool) -> str:
    """Return one sentence that gives the break-even of the dispatch modes in closed form, and the time that overlap
    hides.
    """
    choice = best.choice
    if topology.nodes == 1:
        text = f"EP {topology.ep} fits in one node, where every mode is the same All-to-All"
    else:
        text = (
            f"hierarchical moves nodes x (1 + m) / load = {topology.nodes} x {1 + even.metadata_ratio:.3f} / "
            f"{even.load:.3g} = {even.hierarchical_over_global:.2f} of the global All-to-All's inter-node bytes "
            f"(m: metadata; load: copies of a token, skew {skew:.4g} x top-{top_k}; break-even at "
            f"{even.nodes_limit:.1f} nodes, EP {even.ep_limit:.0f}), deduplicated {even.deduplicated_over_global:.2f}; "
            f"by time {best.mode} is the fastest"
        )
    if not pluggable:
        return f"{text}; plugins.hierarchical_ep and its chunks support only {' and '.join(ARCHITECTURES)}."
    if choice.chunks == (1, 1):
        return f"{text}, and chunks would cost more in launches than they hide."
    b, s = choice.chunks
    if not best.exposed[0]:  # the step is as long as its slowest stage, which may hold dense layers only
        return f"{text}; the slowest stage has no experts, so {b * s} chunks do not shorten the step."
    hidden = 1 - best.exposed[1] / best.exposed[0]
    return f"{text}, and {b * s} chunks (batch {b} x sequence {s}) hide {hidden:.0%} of EP communication."


def _why_global(config: Configuration, node: int) -> str:
    """Return one sentence that says why EP groups that straddle nodes have no other dispatch mode."""
    able = nearest(config.ep, degrees_of(node, config.model.experts, config.dp * config.tp))
    other = f"; expert_parallel: {able} has other modes and chunks" if able else ""
    text = f"some EP groups of {config.ep} ranks lie across nodes of {node} devices"
    return f"{text}, where only the global All-to-All is possible{other}."


_STRIDE = (*OVERLAP, "stride")


def dispatch_values(recipe: Recipe) -> tuple[Values, list[str]]:
    """Return the dispatch mode and the chunks that replace `auto` in a recipe, with one line of text about each value.
    If the recipe has no `auto`, both results are empty.

    The values depend only on the recipe and on the hardware file that the recipe names.

    Args:
        recipe: a recipe with a resolved layout; a layout that is still `auto` counts as even.

    Raises:
        RecipeError: a setting of the recipe is not allowed, or its sizes do not fit each other.
    """
    dispatch = look(recipe, DISPATCH)
    if not dispatch:
        if look(recipe, CHUNKS) == AUTO:
            raise RecipeError(
                "plugins.ep_overlap: this plugin divides the dispatch of plugins.hierarchical_ep into parts; switch "
                "on plugins.hierarchical_ep, too"
            )
        return {}, []
    modes, cuts, stride = left_open(recipe)
    if len(modes) == 1 and cuts:
        return {}, []
    advice = advise(recipe, _hardware(recipe, dispatch), modes=modes, cuts=cuts, stride=stride)
    values: Values = {}
    lines = []
    if look(recipe, MODE) == AUTO:
        values[MODE] = advice.mode
        lines.append(f"{dotted(MODE)}: auto -> {advice.mode} (modelled on {advice.hardware.name}; tc3 ep-report)")
    if not cuts:
        values[CHUNKS], values[_STRIDE] = list(advice.chunks), advice.stride if stride is None else stride
        lines.append(f"plugins.ep_overlap: auto -> chunks {values[CHUNKS]}, stride {values[_STRIDE]}")
    return values, lines


def _hardware(recipe: Recipe, dispatch: dict[str, Any]) -> Hardware:
    """Return the cluster that `auto` is for; CPU workers act as its devices, on nodes as large as the recipe says."""
    hardware = load_hardware(dispatch.get("hardware", DEFAULT_HARDWARE))
    view = View(recipe)
    return replace(hardware, devices_per_node=view.node) if view.on_cpu else hardware
