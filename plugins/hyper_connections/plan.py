"""This module reads `plugins.hyper_connections`, and computes sizes, FLOPs and names of manifold-constrained
hyper-connections (mHC). The module is pure Python.

A layer with hyper-connections carries n residual streams of width h instead of one. Before each sublayer (attention,
then MLP or experts) three gates are computed for each token from all streams x [n, h]:

    w = hc_fn vec(x) / rms(vec(x))                          [2n + n n], hc_fn is [2n + n n, n h]
    H_pre  = sigmoid(scale[0] w[:n] + base[:n])             [n]
    H_post = 2 sigmoid(scale[1] w[n:2n] + base[n:2n])       [n]
    H_res  = Sinkhorn(exp(clip(scale[2] w[2n:] + base[2n:])))   [n, n], row-major [to, from], rows and columns sum to 1

The sublayer F reads H_pre x, and the streams become x' = H_res x + H_post F(norm(H_pre x)). `hc_fn` and `scale` are the
dynamic part of the gates, `base` the static part. The embedding is copied to all streams, and the mean of the streams
goes to the last norm. The MTP layer has one stream.

Sources: Hyper-Connections (arXiv 2409.19606); mHC (arXiv 2512.24880, section 4); for order, epsilon, clip, mean and
names of the weights the public implementations of Xing4.0 (docs/hyper-connections.md says which).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plugins.errors import RecipeError
from plugins.settings import Section, graph_mode_only, setting, value_at

KEY, MODEL = "plugins.hyper_connections", "model.model_config"
CLIP = 30.0  # of the logarithm of H_res before Sinkhorn
EPSILON = 1e-6  # in each denominator of Sinkhorn
SUBLAYERS = {"attn_hc": "attention", "ffn_hc": "MLP or experts"}  # cells of a layer -> whose gates they compute
WEIGHTS = ("hc_fn", "hc_base", "hc_scale")  # of each of them
MOST_STREAMS = 16  # the unrolled graph and H_res grow with the square
OTHER_OPTIMIZER = "Muon"  # it asks each weight of a layer for `sharded_state_dict`, by which it splits it
OFF = f"or {KEY}: False"


@dataclass(frozen=True)
class Settings(Section):
    """A `Settings` says how many residual streams a model has, and with which values its gates begin."""

    KEY = KEY
    RIGHT = f"write {{streams: 4}}, or {KEY}: False"
    CHANGE = ("numbers", "another model")

    streams: int = setting(
        4,
        "residual streams; 1 is the model without hyper-connections, and has no weights of them",
        f"write a number of streams from 1 to {MOST_STREAMS}",
        least=1,
        below=MOST_STREAMS + 1,
    )
    sinkhorn_iterations: int = setting(
        20,
        "how often the rows and then the columns of the residual mapping are divided by their sums",
        "write a number from 1 to 100",
        least=1,
        below=101,
    )
    initial_scale: float = setting(
        0.01,
        "what `hc_scale` begins with: the weight of the dynamic part of the gates",
        "write a number from 0 to below 1,000,000",
        least=0,
        below=1e6,
    )


active: list[Settings] = []  # of the models that this process builds, if they have several streams


def gates(streams: int) -> int:
    """Return the number of gates that one sublayer computes for a token: the elements of H_pre, H_post and H_res."""
    return streams * (2 + streams)


def shapes(streams: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of one sublayer's hyper-connections; the result is empty with one residual
    stream.
    """
    if streams == 1:
        return {}
    return dict(zip(WEIGHTS, ((gates(streams), streams * hidden), (gates(streams),), (3,)), strict=True))


def mixing_flops(streams: int, hidden: int) -> int:
    """Return the forward FLOPs of a token at one sublayer for the products with H_pre, H_post and H_res. The product
    with `hc_fn` is not counted here, because it is counted with the other weights that multiply a token.
    """
    return 2 * hidden * gates(streams) if streams > 1 else 0


def check(written: Any, recipe: Mapping[str, Any]) -> Settings:
    """Return the settings of `plugins.hyper_connections` in a recipe.

    Args:
        written: the recipe's `plugins.hyper_connections`.

    Raises:
        RecipeError: a setting is wrong, or the recipe has a feature that does not work with several streams.
    """
    settings = Settings.read(written)
    if settings.streams == 1:
        return settings
    graph_mode_only(recipe, KEY)
    if value_at(recipe, f"{MODEL}.apply_residual_connection_post_layernorm"):
        wrong = (
            f"{KEY} adds the outputs of layers to its residual streams, not to the layernorms of these streams; "
            f"write False, {OFF}"
        )
        raise RecipeError(wrong, f"{MODEL}.apply_residual_connection_post_layernorm")
    if value_at(recipe, f"{MODEL}.model_architecture") == "yoco":
        wrong = (
            f"layers that share keys and values need one residual stream, but {KEY} has several; write "
            f"decoder_only, {OFF}"
        )
        raise RecipeError(wrong, f"{MODEL}.model_architecture")
    if value_at(recipe, "optimizer.type") == OTHER_OPTIMIZER:
        wrong = f"{OTHER_OPTIMIZER} cannot train the weights that {KEY} adds; write AdamW, {OFF}"
        raise RecipeError(wrong, "optimizer.type")
    return settings
