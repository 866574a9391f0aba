"""The space and its ranking, candidate by candidate: slow and obvious."""

from plugins.hierarchical_ep.plan import MODES
from tools.estimate.memory.model import all_stages
from tools.estimate.time_model import TimeModel
from tools.search.candidates import RECOMPUTE, Candidate, configuration
from tools.search.request import PLANNED, POLICIES, SHARDS


def counted(number):
    return range(1, number + 1)


def every_candidate(request):
    """(candidate, legal) of the whole space."""
    model, n, batch = request.base.model, request.devices, request.global_batch
    for dp, tp, pp, cp in (
        (dp, tp, pp, n // (dp * tp * pp))
        for dp in counted(n)
        for tp in counted(n)
        for pp in counted(n)
        if n % (dp * tp * pp) == 0
    ):
        for vpp in counted(max(1, model.layers // pp)):
            for ep in (ep for ep in counted(max(1, model.experts)) if max(1, model.experts) % ep == 0):
                for mbs in (mbs for mbs in counted(batch) if batch % mbs == 0):
                    m = batch // (dp * mbs)
                    for mode in MODES:
                        for shard in SHARDS:
                            for recompute in RECOMPUTE:
                                one = Candidate(dp, tp, pp, vpp, cp, ep, mbs, m, mode, shard, recompute)
                                yield one, legal(request, one)


def legal(request, c):
    model, sequence = request.base.model, request.base.sequence
    spread = c.ep > request.node and c.ep % request.node == 0
    return (
        all(size % c.tp == 0 for size in (model.heads, model.vocab, model.hidden, model.ffn, model.shared_ffn))
        and (model.latent is not None or model.kv_heads % c.tp == 0)
        and sequence % (c.tp * c.cp) == 0
        and c.cp % request.ulysses == 0
        and (not request.base.shard_size or c.dp * c.cp % request.base.shard_size == 0)
        and model.heads % (c.tp * request.ulysses) == 0
        and (c.cp == 1 or request.flash)
        and c.pp * c.vpp <= model.layers
        and (c.vpp == 1 or c.pp > 1)
        and c.dp * c.tp % c.ep == 0
        and (request.devices in (1, 2, 4) or request.devices % 8 == 0)
        and (not request.base.ep_cut or c.ep % request.node == 0 or request.node % c.ep == 0)
        and c.dp * c.mbs * c.m == request.global_batch
        and c.m >= c.pp
        and (spread or c.mode == "global")
        and request.node % c.tp == 0
        and (c.pp == c.m == 1 or c.shard != "gradients")
        and (c.shard == "none" or not loses_gradients(request, c))
    )


def loses_gradients(request, c):
    """Accumulated gradients of weights that one rank holds: experts, or all that nothing copies."""
    if c.pp > 1 or c.m == 1:
        return False
    return c.dp * c.cp == 1 or (request.base.model.experts > 0 and c.ep == c.dp * c.tp * c.cp)


def predicted(request, candidate):
    """(seconds, bytes of the heaviest stage); None where it does not fit."""
    model = TimeModel(request.hardware)
    if candidate.recompute != PLANNED:
        config = configuration(request, candidate)
        peak = max(memory.peak for memory in all_stages(config))
        return (model.step(config).total, peak) if peak <= request.room else None
    configs = [configuration(request, candidate._replace(recompute=policy)) for policy in POLICIES]
    peaks = [[memory.peak for memory in all_stages(config)] for config in configs]
    works = [sum(model.chunks(config)[:2]).sum(axis=0) for config in configs]
    stages = [
        cheapest_mix(*points, request.room)
        for points in zip(zip(*peaks, strict=True), zip(*works, strict=True), strict=True)
    ]
    if None in stages:
        return None
    work = [seconds for seconds, _ in stages]
    config, vpp = configs[0], candidate.vpp
    sending = 2 * model.transfer(config) * vpp if candidate.pp > 1 else 0
    every = [seconds + sending for seconds in work]
    pipeline = candidate.m * max(every) + (sum(every) - max(every)) / vpp
    slowest = work.index(max(work))
    rest = model._data(config, slowest, max(work)) + model.optimizer(config, slowest) + model.fixed
    return pipeline + rest, max(peak for _, peak in stages)


def cheapest_mix(peaks, works, cap):
    """(seconds, bytes) of the best point under the cap on a line between two of the points."""
    found = [(work, peak) for work, peak in zip(works, peaks, strict=True) if peak <= cap]
    for low, low_work in zip(peaks, works, strict=True):
        for high, high_work in zip(peaks, works, strict=True):
            if low <= cap < high:
                share = (cap - low) / (high - low)
                found.append((low_work + share * (high_work - low_work), cap))
    return min(found, default=None)
