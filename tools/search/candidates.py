"""This module enumerates the space of parallel strategies: every legal candidate, and for every excluded candidate the
rule that excludes it.

A candidate consists of a mesh dp x tp x pp x cp of all devices, vpp chunks per stage (1 .. layers // pp), ep (a divisor
of the number of experts), the samples of a micro-batch (a divisor of the global batch, which determines the number of
micro-batches), a dispatch mode, the sharding over data-parallel ranks, and the recomputation. The degrees are all
divisors, not only powers of two.

A candidate is counted under the first rule that it breaks (`mesh_rules`, then `_Axes`). The rules exclude candidates
that MindFormers cannot build (each is an error of `tc3 check`), duplicates (dispatch modes differ only if an EP group
covers several whole nodes), candidates that the report excludes (section 5.1: "constraining TP to intra-node
communication"), and candidates outside of the user's limits. Sequence parallelism is on if tp > 1, because experts need
it, and because it needs less memory with the same traffic.

A funnel counts the candidates that each rule drops. For ranking, layers are distributed over stages and chunks as
evenly as possible, with the head and MTP layers weighted by their FLOPs. The pipeline optimiser then places the layers
of the best candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from plugins.attention_balance.objective import groups_fit
from plugins.batch_ramp.plan import fewest_micro_batches
from plugins.hierarchical_ep.plan import MODES
from tools.check.arithmetic import without_copies
from tools.check.groups import SIZES, splits_over
from tools.check.muon import left_whole
from tools.estimate.configuration import Configuration, Table, tensor_cuts
from tools.estimate.from_recipe import compiles_sharded_gradients
from tools.estimate.layer_model import work
from tools.model import Model, Weight
from tools.pipeline.schedules import can_run, is_v_shaped, scheduler_of
from tools.search.request import PLANNED, POLICIES, SHARDS, Request


@dataclass
class Funnel:
    """A `Funnel` counts the candidate strategies of a search: all candidates, and for each rule the candidates that it
    dropped. A candidate counts as dropped by the first rule that the candidate breaks.
    """

    total: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str, count: int) -> None:
        """Count the candidates that a rule has excluded."""
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    @property
    def left(self) -> int:
        """Return the number of candidates that no rule has dropped."""
        return self.total - sum(self.dropped.values())

    def lines(self) -> list[tuple[str, int]]:
        """Return table rows with numbers of candidate strategies: all candidates, the candidates that each rule dropped
        (as a negative number), and the remaining candidates.
        """
        return [("all", self.total), *((reason, -count) for reason, count in self.dropped.items()), ("left", self.left)]


@lru_cache(maxsize=4096)
def balanced_layers(model: Model, sequence: int, stages: int, chunks: int, turned: bool = False) -> Table:
    """Return a balanced distribution of the model's layers, as the number of layers of each chunk and stage,
    [chunks][stages]; the model must have at least stages x chunks layers. If `turned` is True, odd chunks run from the
    last stage to the first, so that the pipeline forms a V.

    1. Each chunk gets one layer; the last chunk gets none if the head already weighs as much as a layer. The last chunk
      of a V keeps its layer: MindFormers lets only the first and the last entry of an offset be empty.
    2. Each other layer goes to the stage with the least load; of several such stages it goes to the last, which holds
      the fewest micro-batches. On this stage the layer goes to the chunk with the least load; of several such chunks it
      goes to the first.
    """
    extra = end_weight(model, sequence)
    counts = [[1] * stages for _ in range(chunks)]
    # an MTP layer would move to the place before an empty last chunk
    end = 0 if turned and chunks % 2 == 0 else stages - 1
    if extra >= 1 and not model.mtp and stages * chunks > 1 and end == stages - 1:
        counts[-1][end] = 0

    def load(chunk: int, stage: int) -> float:
        return counts[chunk][stage] + (extra if (chunk, stage) == (chunks - 1, end) else 0.0)

    for _ in range(model.layers - sum(map(sum, counts))):
        loads = [round(sum(load(chunk, stage) for chunk in range(chunks)), 6) for stage in range(stages)]
        stage = max(index for index in range(stages) if loads[index] == min(loads))
        chunk = min(range(chunks), key=lambda index: (load(index, stage), index))
        counts[chunk][stage] += 1
    return tuple(tuple(row) for row in counts)


@lru_cache(maxsize=256)
def end_weight(model: Model, sequence: int) -> float:
    """Return the FLOPs of the head and the MTP layers, divided by the FLOPs of the model's last layer."""
    config = Configuration(model, layers=((model.layers,),), sequence=sequence)
    ends = work(config, "head").flops + model.mtp * work(config, "mtp").flops
    return ends / work(config, model.last_kind).flops


RECOMPUTE = (*POLICIES, PLANNED)
COLUMNS = ("dp", "tp", "cp", "ep", "mbs", "m", "mode", "shard")
_KEPT_SCHEDULES = ("seqsmartvpp",)  # of a recipe; others run 1f1b, interleaved where there are several chunks


class Candidate(NamedTuple):
    """A `Candidate` is one parallel strategy of the search: the parallel degrees, `m` micro-batches of `mbs` samples,
    the dispatch mode, the optimizer's sharding, and the recomputation.
    """

    dp: int
    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    mbs: int
    m: int
    mode: str
    shard: str
    recompute: str

    @property
    def words(self) -> str:
        """Return the strategy in words, as a part of a line of text."""
        degrees = f"dp{self.dp} tp{self.tp} pp{self.pp} vpp{self.vpp} cp{self.cp} ep{self.ep}, {self.m} x {self.mbs}"
        return f"{degrees}, {self.mode}, sharded: {self.shard}, recompute: {self.recompute}"


class Mesh(NamedTuple):
    """A `Mesh` holds the parallel degrees dp, tp, pp and cp, whose product is the number of devices."""

    dp: int
    tp: int
    pp: int
    cp: int


@dataclass(frozen=True)
class Block:
    """A `Block` is a table of all legal candidate strategies with the same pp and vpp. Each column holds, as integers,
    one of the other parallel degrees, such as dp, or another choice of the strategies. Each row of the table stands for
    several candidates: one for each kind of recomputation in `recompute`.
    """

    pp: int
    vpp: int
    columns: dict[str, np.ndarray]
    recompute: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.columns["dp"])

    def select(self, rows: np.ndarray) -> Block:
        """Return a block with some rows of this block, which are given by indices or a mask."""
        return replace(self, columns={name: column[rows] for name, column in self.columns.items()})

    def candidate(self, row: int, recompute: str) -> Candidate:
        """Return the candidate strategy that one row of the block describes, with the given recomputation."""
        values: dict[str, Any] = {name: int(column[row]) for name, column in self.columns.items()}
        values |= {"mode": MODES[values["mode"]], "shard": SHARDS[values["shard"]]}
        return Candidate(pp=self.pp, vpp=self.vpp, recompute=recompute, **values)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def meshes(devices: int) -> Iterator[Mesh]:
    """Yield every ordered way to write `devices` as dp x tp x pp x cp."""
    for pp in divisors(devices):
        for tp in divisors(devices // pp):
            for cp in divisors(devices // pp // tp):
                yield Mesh(devices // pp // tp // cp, tp, pp, cp)


def blocks(request: Request, funnel: Funnel) -> list[Block]:
    """Return all legal candidate strategies, as one block for each pair of pp and vpp; `funnel` counts the candidates
    that are not legal.
    """
    model = request.base.model
    found: dict[tuple[int, int], list[dict[str, np.ndarray]]] = {}
    eps, batches = divisors(max(1, model.experts)), divisors(request.global_batch)
    own = [limit for limit in request.limits if limit.name == "recompute"]
    recompute = tuple(word for index, word in enumerate(RECOMPUTE) if all(limit.keeps(index) for limit in own))
    for mesh in meshes(request.devices):
        axes = _Axes(mesh, list(range(1, max(1, model.layers // mesh.pp) + 1)), eps, batches)
        alive = axes.survivors(request, funnel)
        if alive is not None:
            for vpp, columns in axes.columns(alive, request.global_batch):
                found.setdefault((mesh.pp, vpp), []).append(columns)
    return [
        Block(pp, vpp, {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}, recompute)
        for (pp, vpp), parts in sorted(found.items())
    ]


class _Axes:
    """An `_Axes` holds the candidates of one mesh as an array [vpp, ep, batch, mode, shard, recompute]."""

    def __init__(self, mesh: Mesh, vpps: list[int], eps: list[int], batches: list[int]):
        self.mesh = mesh
        self.values = {
            "vpp": np.array(vpps),
            "ep": np.array(eps),
            "mbs": np.array(batches),
            "mode": np.arange(len(MODES)),
            "shard": np.arange(len(SHARDS)),
            "recompute": np.arange(len(RECOMPUTE)),
        }
        self.shape = tuple(len(values) for values in self.values.values())

    def along(self, name: str) -> np.ndarray:
        """Return the values of a named axis (such as ep) of the candidates' array, in a shape that NumPy broadcasts
        along this axis.
        """
        place = list(self.values).index(name)
        return self.values[name].reshape([-1 if axis == place else 1 for axis in range(len(self.shape))])

    def survivors(self, request: Request, funnel: Funnel) -> np.ndarray | None:
        """Return which candidates with these degrees dp, tp, pp and cp satisfy all rules, as a bool array over the
        other choices. Return None if no candidate satisfies all rules.
        """
        size = int(np.prod(self.shape))
        funnel.total += size
        for reason, kept in mesh_rules(request, self.mesh):
            if not kept:
                funnel.drop(reason, size)
                return None
        alive = np.ones(self.shape, bool)
        for reason, mask in (*self._rules(request), *self._limits(request)):
            before = size
            alive &= mask
            size = int(alive.sum())
            funnel.drop(reason, before - size)
            if not size:
                return None
        return alive

    def _rules(self, request: Request) -> Iterator[tuple[str, np.ndarray]]:
        dp, tp, pp, cp = self.mesh
        vpp, ep, mbs, mode = (self.along(name) for name in ("vpp", "ep", "mbs", "mode"))
        yield "vpp: chunks without a pipeline", (vpp == 1) | np.bool_(pp > 1)
        yield "ep: does not divide dp x tp", dp * tp % ep == 0
        aligned = (ep % request.node == 0) | (request.node % ep == 0)
        yield "ep: straddles nodes, which ep_overlap does not", aligned | np.bool_(not request.base.ep_cut)
        yield "ep_overlap: more chunks than samples of a micro-batch or tokens of a rank", self._cuts(request)
        yield "batch: dp x samples of a micro-batch do not divide it", request.global_batch % (dp * mbs) == 0
        yield "batch: fewer micro-batches than stages", request.global_batch // (dp * mbs) >= pp
        if request.devices == 1 and not request.splits:
            words = "batch: several micro-batches, which MindFormers accumulates only where the model is split"
            yield words, request.global_batch // mbs == 1
        if request.ramp:
            yield "batch: a stage of plugins.batch_ramp cannot be divided, or has too few samples", self._ramps(request)
        if request.whole_sequences:
            yield "ep: holds parts of sequences, and plugins.group_aux_loss needs whole ones", ep % tp == 0
        if request.whole_ranks:
            words = "ep: neither whole data-parallel ranks nor a part of one, which plugins.attention_balance needs"
            yield words, groups_fit(dp, ep, cp * tp)
        whole = (ep > request.node) & (ep % request.node == 0)
        if request.schedule:
            words = f"schedule: {request.schedule} does not run with these stages, chunks and micro-batches"
            yield words, self._runs(request)
        yield "mode: all the same unless an EP group covers several whole nodes", whole | (mode == 0)
        if not request.pluggable:
            words = "mode: plugins.hierarchical_ep, which deduplicates, cannot change the class of the model"
            yield words, mode != MODES.index("deduplicated")
        yield "tp: does not divide a node (report 5.1)", np.array(request.node % tp == 0)
        whole = self.along("shard") != SHARDS.index("gradients")
        words = "shard: gradients of several micro-batches, which MindSpore does not finish compiling"
        accumulates = (request.global_batch // (dp * mbs) > 1) & np.bool_(pp == 1)
        yield words, whole | (np.bool_(compiles_sharded_gradients(pp)) & ~accumulates)
        words = "shard: accumulated gradients of weights without a copy, which a sharded optimizer never sees"
        all_weights, experts = without_copies(dp, tp, cp, ep, request.base.model.experts)
        yield words, (self.along("shard") == 0) | ~(accumulates & (experts | np.bool_(all_weights)))
        if request.base.muon:
            words = (
                "shard: Muon cuts matrices over optimizer_weight_shard_size of the data-parallel ranks, and no expert"
            )
            yield words, (self.along("shard") == 0) | self._whole_experts(request)
            words = "shard: Muon takes a matrix below parallel_optimizer_threshold for a shard; write 0 to shard it"
            yield words, (self.along("shard") == 0) | np.bool_(self._whole_matrices(request) is None)

    def _whole_experts(self, request: Request) -> np.ndarray:
        """Return where Muon's shards are at most the data-parallel ranks, and hold whole experts."""
        size, ep = request.base.shard_size, self.along("ep")
        sharing = np.minimum(size, self.mesh.dp * self.mesh.tp * self.mesh.cp // ep)
        fits = 1 < size <= self.mesh.dp
        return np.bool_(fits) & (request.base.model.experts % np.maximum(ep * sharing, 1) == 0)

    def _whole_matrices(self, request: Request) -> Weight | None:
        """Return a matrix that Muon takes for a shard where data-parallel ranks share the optimizer."""
        dp, tp, _, cp = self.mesh
        layers = ((request.base.model.layers,),)
        return left_whole(replace(request.base, dp=dp, tp=tp, cp=cp, pp=1, ep=1, layers=layers, shard_optimizer=True))

    def _ramps(self, request: Request) -> np.ndarray:
        """Return where each stage of a growing batch has enough whole micro-batches, and fewer samples than all."""
        unit, schedule = self.mesh.dp * self.along("mbs"), request.schedule
        least = fewest_micro_batches(self.mesh.pp, scheduler_of(schedule) if schedule else "")
        fits = [(samples % unit == 0) & (samples // unit >= least) for samples in request.ramp]
        return np.logical_and.reduce(fits) & np.bool_(request.ramp[-1] < request.global_batch)

    def _cuts(self, request: Request) -> np.ndarray:
        """Return where the chunks that the recipe writes can be."""
        cut = request.base.ep_cut
        b, s = cut.chunks if cut and cut.chunks else (1, 1)
        rows = request.base.sequence // (self.mesh.tp * self.mesh.cp)
        return (self.along("ep") == 1) | ((self.along("mbs") >= b) & np.bool_(rows >= s))

    def _runs(self, request: Request) -> np.ndarray:
        """Return where the schedule that is asked for can run."""
        numbers = request.global_batch // (self.mesh.dp * self.values["mbs"])
        runs = [
            [self.mesh.pp > 1 and can_run(request.schedule, self.mesh.pp, int(vpp), int(m)) for m in numbers]
            for vpp in self.values["vpp"]
        ]
        return self.along("vpp").astype(bool) & np.array(runs)[:, None, :, None, None, None]

    def _limits(self, request: Request) -> Iterator[tuple[str, np.ndarray]]:
        fixed = self.mesh._asdict()
        for limit in request.limits:
            if limit.name in fixed:
                numbers = np.array(fixed[limit.name])
            elif limit.name == "m":
                numbers = request.global_batch // (self.mesh.dp * self.along("mbs"))
            else:
                numbers = self.along(limit.name)
            yield f"--limit {limit.text}", limit.keeps(numbers)

    def columns(self, alive: np.ndarray, batch: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Yield (vpp, columns) for each vpp; `columns` holds an array of each value of the candidates with
        this vpp that no rule has removed.
        """
        rows = alive.any(axis=-1)
        for index, vpp in enumerate(self.values["vpp"]):
            ep, mbs, mode, shard = np.nonzero(rows[index])
            if len(ep):
                samples = self.values["mbs"][mbs]
                values = {"ep": self.values["ep"][ep], "mbs": samples, "m": batch // (self.mesh.dp * samples)}
                values |= {"mode": mode, "shard": shard}
                values |= {name: np.full(len(ep), getattr(self.mesh, name)) for name in ("dp", "tp", "cp")}
                yield int(vpp), values


def mesh_rules(request: Request, mesh: Mesh) -> Iterator[tuple[str, bool]]:
    """Return pairs (rule, whether the mesh satisfies the rule), in the order in which the rules are checked."""
    model, sequence = request.base.model, request.base.sequence
    dp, tp, pp, cp = mesh
    size = request.base.shard_size
    yield f"devices: MindSpore splits a model over {SIZES} only", splits_over(request.devices)
    for words, sizes in tensor_cuts(model).items():
        yield f"tp: {words}", all(size % tp == 0 for size in sizes)
    yield "cp: does not divide the sequence, or the part of it that tp cuts", sequence % (cp * tp) == 0
    yield "cp: needs flash attention", cp == 1 or request.flash
    yield "cp: ulysses_degree_in_cp does not divide it", cp % request.ulysses == 0
    yield "tp: with ulysses_degree_in_cp does not divide the heads", model.heads % (tp * request.ulysses) == 0
    yield "pp: more stages than layers", pp <= model.layers
    yield "dp x cp: optimizer_weight_shard_size does not divide it", not size or dp * cp % size == 0


def schedule_of(request: Request, pp: int, vpp: int) -> str:
    """Return the pipeline schedule that a candidate runs."""
    if request.schedule and pp > 1:
        return request.schedule
    if vpp == 1:
        return "1f1b"
    own = request.base.schedule
    return own if own in _KEPT_SCHEDULES and pp % 2 == 0 else "interleaved_1f1b"


def configuration(request: Request, candidate: Candidate) -> Configuration:
    """Return the configuration of a candidate with balanced layers; with "planned" recomputation, all layers count as
    recomputed until the pipeline optimiser has placed the layers.
    """
    schedule = schedule_of(request, candidate.pp, candidate.vpp)
    turned = is_v_shaped(schedule)
    layers = balanced_layers(request.base.model, request.base.sequence, candidate.pp, candidate.vpp, turned)
    word = "full" if candidate.recompute == PLANNED else candidate.recompute
    tables: dict[str, Any] = {"full": None, "select": None, "communication": None} | (
        {word: layers} if word != "none" else {}
    )
    return replace(
        request.base,
        **{name: getattr(candidate, name) for name in ("dp", "tp", "pp", "cp", "ep")},
        layers=layers,
        schedule=schedule,
        batch=candidate.mbs,
        micro_batches=candidate.m,
        recompute=replace(request.base.recompute, **tables, operators=()),
        sequence_parallel=candidate.tp > 1,
        ep_mode=candidate.mode,
        shard_optimizer=candidate.shard != "none",
        shard_gradients=candidate.shard == "gradients",
        ep_cut=request.base.ep_cut if candidate.ep > 1 else None,
        ulysses=request.ulysses,
        skew=request.skew(candidate.ep),
    )


def candidate_of(config: Configuration) -> Candidate:
    """Return the candidate strategy closest to a run: the run's parallel degrees, and its recomputation if all layers
    recompute in the same way.
    """
    given = {word: getattr(config.recompute, word) for word in POLICIES[1:]}
    same = [word for word, table in given.items() if table == config.layers]
    used = [word for word, table in given.items() if table] + [word for word, _ in config.recompute.operators]
    policy = same[0] if same and used == same[:1] else PLANNED if used else "none"
    shard = SHARDS[config.shard_optimizer + (config.shard_optimizer and config.shard_gradients)]
    degrees = (config.dp, config.tp, config.pp, config.chunks, config.cp, config.ep)
    return Candidate(*degrees, config.batch, config.micro_batches, config.ep_mode, shard, policy)
