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


def swapped(
    saved: float,
    moved: float,
    one_way: float,
    forward: float,
    backward: float,
    both_ways: bool = True,
    prefetch: int = 1,
) -> Swapped:
    """What swapping `moved` of the `saved` bytes of a layer's activations means.

    Args:
        saved: bytes that a micro-batch leaves for the layer's backward.
        moved: bytes of them that are swapped.
        one_way: seconds in which the link to the host carries `moved` in one direction.
        forward: seconds of the layer's forward.
        backward: seconds of its backward.
        both_ways: whether the link carries both directions at full rate at once.
        prefetch: layers by which fetching is ahead (`backward_prefetch`).

    Raises:
        RecipeError: more is moved than there is, a negative time, or no layer ahead.
    """
    if not 0 <= moved <= saved:
        raise RecipeError(f"swap: {moved:g} bytes of {saved:g} cannot be moved")
    if one_way < 0 or prefetch < 1:
        raise RecipeError(f"swap: {one_way:g} seconds, {prefetch} layers ahead: want at least 0, and at least 1")
    there_and_back = one_way if both_ways else 2 * one_way
    extra = max(0.0, one_way - backward, there_and_back - forward - backward)
    return Swapped(extra, saved - moved, (1 + prefetch) * moved)


def free_seconds(forward: float, backward: float, both_ways: bool = True) -> float:
    """The longest one-way transfer of a layer's activations that its computation hides."""
    return backward if both_ways else min(backward, (forward + backward) / 2)
