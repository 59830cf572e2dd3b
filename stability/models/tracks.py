"""Embed several tracks of one sequence.

Source tracks are embedded and summed; context tracks enter once, before the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from stability.models.block import Context


class Track(NamedTuple):
    """A context of a sequence.

    Attributes:
        tokens: int64, (B, J), or (B, J, K) with up to K tokens per entry.
        mask: True for a readable token, same shape.
    """

    tokens: Tensor
    mask: Tensor

    @property
    def entries_BJ(self) -> Tensor:
        """Whether each entry has a readable token, (B, J)."""
        return self.mask if self.mask.ndim == 2 else self.mask.any(-1)


class TrackInputs(NamedTuple):
    """The input tokens of a model with several tracks.

    Attributes:
        sources: int64 tokens (B, N) of each source track.
        contexts: the model's context tracks, in its order.
    """

    sources: tuple[Tensor, ...]
    contexts: tuple[Track, ...] = ()


class SummedEmbedding(nn.Module):
    """The sum (B, N, D) of one embedding per source track."""

    def __init__(self, sizes: Sequence[int], width: int):
        super().__init__()
        self.tracks = nn.ModuleList(nn.Embedding(size, width) for size in sizes)

    def forward(self, inputs: TrackInputs) -> Tensor:
        assert len(inputs.sources) == len(self.tracks)
        x_BND, *others = (embed(tokens_BN) for embed, tokens_BN in zip(self.tracks, inputs.sources, strict=True))
        for embedded_BND in others:
            x_BND = x_BND + embedded_BND
        return x_BND


class TrackEmbedding(nn.Module):
    """An embedding of a context's entries, (B, J, D).

    For an entry of several tokens, it is the mean over the readable ones, 0 without any.
    """

    def __init__(self, size: int, width: int):
        super().__init__()
        self.table = nn.Embedding(size, width)

    def forward(self, track: Track) -> Tensor:
        embedded = self.table(track.tokens)
        if track.tokens.ndim == 2:
            return embedded
        share_BJK = track.mask.to(embedded.dtype) / track.mask.sum(-1, keepdim=True).clamp_min(1)
        return (embedded * share_BJK[..., None]).sum(2)


class Conditioned(nn.Module):
    """The summed sources, plus one cross mechanism per context, in turn.

    Args:
        sources: embedding of the sources.
        contexts: per context, its embedding and whether its entries are aligned with the source positions.
        norms: norm of each embedded context.
        branches: cross branches with a plain residual connection. They leave a row of the batch unchanged if the row's
            context has no readable entry.
    """

    own_roles: ClassVar = {"norms": "norm"}

    def __init__(
        self,
        sources: nn.Module,
        contexts: Sequence[tuple[nn.Module, bool]],
        norms: Sequence[nn.Module],
        branches: Sequence[nn.Module],
    ):
        super().__init__()
        self.sources = sources
        self.tracks, self.norms, self.branches = (
            nn.ModuleList(embed for embed, _ in contexts),
            nn.ModuleList(norms),
            nn.ModuleList(branches),
        )
        self._aligned = [is_aligned for _, is_aligned in contexts]

    def start_local(self, bias: float) -> None:
        """Let mechanisms of aligned contexts start local, with q and k biases of ``bias``.

        Each position then attends most to its own place. Mechanisms without such a start are unchanged.
        """
        branches: Any = self.branches
        for branch, is_aligned in zip(branches, self._aligned, strict=True):
            if is_aligned:
                branch.mechanism.start_local(bias)

    def forward(self, inputs: TrackInputs) -> Tensor:
        x_BND = self.sources(inputs)
        parts: Any = zip(self.tracks, self.norms, self.branches, inputs.contexts, strict=True)
        for embed, norm, branch, track in parts:
            x_BND = branch(x_BND, Context(norm(embed(track)), track.entries_BJ), None)
        return x_BND


def frame_tokens(tokens_BN: Tensor, num_B: Tensor, bos: int, eos: int) -> Tensor:
    """Return each row as ``bos``, its first ``num_B`` tokens, ``eos``, padding; (B, N + 2).

    Args:
        tokens_BN: the rows; the tokens after ``num_B`` are the padding.
        num_B: number of tokens of each row.
        bos: first token.
        eos: token after the last.
    """
    rows = torch.arange(len(tokens_BN))
    framed_BN = nn.functional.pad(tokens_BN, (1, 1))
    framed_BN[:, 0] = bos
    framed_BN[rows, num_B + 1] = eos
    return framed_BN
