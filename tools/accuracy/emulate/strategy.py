"""A parallel strategy of the emulation: its sizes, its mesh, and whether a model can be cut that way."""

from __future__ import annotations

from dataclasses import dataclass

from tools.accuracy.emulate.sizes import Sizes


@dataclass(frozen=True)
class Strategy:
    """How the step of a model is spread.

    Args:
        micro: micro-batches whose gradients are accumulated; dp, cp, tp, pp, ep: sizes of data, context, tensor,
            pipeline and expert parallelism; sequence_parallel: norms on slices of the sequence over tp;
        zero: the optimizer's state cut over dp; mode: of dispatch; chunks: (batch, sequence) chunks of overlap.
    """

    micro: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    zero: bool = False
    mode: str = "global"
    chunks: tuple[int, int] = (1, 1)

    @property
    def mesh(self) -> dict[str, int]:
        """Axes of the ranks of one pipeline stage."""
        return {"dp": self.dp, "cp": self.cp, "tp": self.tp}

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.cp * self.tp

    @property
    def token_ranks(self) -> int:
        """Ranks of a stage with tokens of their own."""
        return self.dp * self.cp * (self.tp if self.sequence_parallel else 1)

    @property
    def expert_mesh(self) -> dict[str, int]:
        """The same ranks by expert-parallel group; without sequence parallelism tp cuts the experts themselves."""
        inner = 1 if self.sequence_parallel else self.tp
        return {"edp": self.token_ranks // self.ep, "ep": self.ep, "tp": inner}

    def misfit(self, sizes: Sizes) -> str:
        """Why a model of these sizes cannot be cut this way; empty when it can."""
        split = self.cp * (self.tp if self.sequence_parallel else 1)
        inner = 1 if self.sequence_parallel else self.tp
        rules = [
            ("samples of a step", sizes.batch, self.micro * self.dp * self.chunks[0]),
            ("tokens of a sample", sizes.length, split * self.chunks[1]),
            ("attention heads", sizes.heads, self.tp),
            ("entries of the vocabulary", sizes.vocabulary, self.tp),
            ("columns of the dense FFN", sizes.ffn, self.tp),
            ("columns of the shared expert", sizes.shared_ffn, self.tp),
            ("columns of an expert", sizes.expert_ffn, inner),
            ("experts", sizes.experts, self.ep),
            ("ranks with tokens", self.token_ranks, self.ep),
        ]
        for what, number, parts in rules:
            if number % parts:
                return f"{number} {what} cannot be cut into {parts}"
        if self.pp > sizes.layers:
            return f"{sizes.layers} layers cannot be cut into {self.pp} stages"
        return ""

    def stage_of(self, layer: int, layers: int) -> int:
        """The pipeline stage of a layer."""
        return layer * self.pp // layers
