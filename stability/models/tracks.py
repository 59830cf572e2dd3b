"""Models read several tracks of one sequence: source tracks are embedded and summed, context tracks enter once, before
the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from stability.models.block import Context


class Track(NamedTuple):
    """A context of a sequence: int64 tokens (B, J), or (B, J, K) where an entry has up to K of them; the mask, of the
    same shape, is True where a token may be read."""

    tokens: Tensor
    mask: Tensor

    @property
    def entries_BJ(self) -> Tensor:
        """Whether each entry holds anything to read, (B, J)."""
        return self.mask if self.mask.ndim == 2 else self.mask.any(-1)


class TrackInputs(NamedTuple):
    """The tokens that a model of several tracks reads. ``sources``: int64 tokens (B, N) of each source track;
    ``contexts``: those that the model was built for, in its order."""

    sources: tuple[Tensor, ...]
    contexts: tuple[Track, ...] = ()


class SummedEmbedding(nn.Module):
    """An embedding of several source tracks, the sum (B, N, D) of one of each."""

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
    """An embedding of a context's entries, (B, J, D): an entry's embedding, or the mean of those of its tokens that may
    be read, 0 where there is none."""

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
    """The summed sources, to which each context adds in turn what a cross mechanism of its own reads in it.
    ``branches``: cross branches with a plain residual connection, which leave a row of the batch as it is where that
    row's context has no entry that may be read. ``contexts``: what embeds each, and whether it stands position by
    position beside the sources."""

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
        """Let the mechanisms of what stands beside the sources begin at each position's own place, as far as they have
        such a start."""
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


def framed(tokens_BN: Tensor, num_B: Tensor, bos: int, eos: int) -> Tensor:
    """Frame each row, (B, N + 2): ``bos``, the row's first ``num_B`` tokens, ``eos``, and then what the row holds
    behind them, as its padding."""
    rows = torch.arange(len(tokens_BN))
    framed_BN = nn.functional.pad(tokens_BN, (1, 1))
    framed_BN[:, 0] = bos
    framed_BN[rows, num_B + 1] = eos
    return framed_BN
