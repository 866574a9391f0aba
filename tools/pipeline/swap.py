"""Activations that wait for their backward in the host's memory: what it frees, what the link to the host costs.

MindFormers 1.9.0 swaps by `model.model_config.swap` with `layer_swap` (whole layers) or `op_swap` (operators by
pattern); `swap_config` reaches no model. A layer's activations leave while the layers after it run, and come back,
`backward_prefetch` layers ahead, while the backward of the layers behind it runs.

The model, for a stage that is never idle (bubbles hide more):
* coming back is hidden behind backward only: what a layer's bytes take beyond a layer's backward adds to it;
* leaving is hidden behind forward and backward of any micro-batch; a link that carries one direction at a time must
  carry both in that;
* the first layer of a backward is fetched behind the operation before it, which is taken to be a backward, too;
* of swapped layers only those on their way take memory: 1 + prefetch, however many micro-batches are in flight.
Not modelled: the host's memory bandwidth, which all devices of a node share, and a micro-batch whose backward follows
its forward at once (the last stage), which had better not be swapped.
"""

from __future__ import annotations

from dataclasses import dataclass

from plugins.errors import RecipeError


@dataclass(frozen=True)
class HostLink:
    """A device's own link to its host.

    Args:
        bytes_per_s: that a copy reaches in one direction. PCIe 4.0 x16 is 31.5e9 nominal; what a device of a full node
            reaches must be measured (no hardware file has it).
        both_ways: whether both directions run at this rate at once.
    """

    bytes_per_s: float
    both_ways: bool = True


@dataclass(frozen=True)
class Swapped:
    """A layer that swaps: the terms of a recompute option in `tools.placement.instance.Option`.

    Args:
        extra_backward: seconds added to the layer's backward.
        activation: bytes that stay on the device for each micro-batch in flight.
        once: bytes on their way, which a stage needs once, however many layers swap.
    """

    extra_backward: float
    activation: float
    once: float


def swapped(link: HostLink, saved: float, moved: float, forward: float, backward: float, prefetch: int = 1) -> Swapped:
    """What swapping `moved` of the `saved` bytes of a layer's activations means.

    Args:
        link: to the host.
        saved: bytes that a micro-batch leaves for the layer's backward.
        moved: bytes of them that are swapped.
        forward: seconds of the layer's forward.
        backward: seconds of its backward.
        prefetch: layers by which fetching is ahead (`backward_prefetch`).

    Raises:
        RecipeError: more is moved than there is, or a rate or prefetch that is not positive.
    """
    if not 0 <= moved <= saved:
        raise RecipeError(f"swap: {moved:g} bytes of {saved:g} cannot be moved")
    if link.bytes_per_s <= 0 or prefetch < 1:
        raise RecipeError(f"swap: {link.bytes_per_s:g} bytes/s, {prefetch} layers ahead: want more than 0, at least 1")
    one_way = moved / link.bytes_per_s
    there_and_back = one_way if link.both_ways else 2 * one_way
    extra = max(0.0, one_way - backward, there_and_back - forward - backward)
    return Swapped(extra, saved - moved, (1 + prefetch) * moved)


def free_bytes(link: HostLink, forward: float, backward: float) -> float:
    """The most bytes of a layer's activations that can be swapped behind its computation."""
    return link.bytes_per_s * min(backward, forward + backward if link.both_ways else (forward + backward) / 2)
