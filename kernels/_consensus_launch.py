"""Lay out what the kernels of consensus are given: sizes, addresses and the shapes of their tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PRECISIONS = ("ieee", "tf32x3", "tf32", "bf16")
LARGEST = {"window": 16, "rank": 16, "hidden": 256, "head width": 128}
LONGEST = 32  # nodes of a tile, unless its halo asks for more
COLUMNS = 256  # of Λ that a program holds at once
SLAB = 32  # features of the hidden layer at once
HELD = 1 << 14  # entries of the gradient by W_Λ that a program holds
PROGRAMS = 264  # that sum up gradients by weights: two for each multiprocessor of an H100
NUM_WARPS = 8


class Ends(NamedTuple):
    """The two ends of the edges: the signal of each, what each gives to the edge network, which of each are valid.

    ``own_HKBN, other_HKBJ, source_HXBN, target_HXBJ, own_mask_BN, other_mask_BJ``; masks are bool or None. ``both``:
    the other end is the same sequence, and each of its edges goes both ways. ``window``: None for every i → j.
    ``turn_2KJ``: cosine and signed sine, [cos; cos] and [−sin; sin], of the rotation by each target of edges, which
    turns disagreements back; None: they are not turned.
    """

    own: Tensor
    other: Tensor
    source: Tensor
    target: Tensor
    own_mask: Tensor | None
    other_mask: Tensor | None
    both: bool
    window: int | None
    turn: Tensor | None = None

    def swapped(self) -> Ends:
        """Return the ends with source and target changed round."""
        return Ends(
            self.other, self.own, self.target, self.source, self.other_mask, self.own_mask, self.both, self.window,
            self.turn,
        )  # fmt: skip

    @property
    def reach(self) -> int:
        """How far apart two ends in the window are at most; 0 without a window."""
        return 0 if self.window is None else max(0, min(self.window, max(self.own.shape[-1], self.other.shape[-1]) - 1))

    @property
    def num_steps(self) -> int:
        """How many other ends a tile goes through."""
        if self.window is None:
            return self.other.shape[-1]
        return self.reach if self.both else 2 * self.reach + 1

    @property
    def halo(self) -> int:
        """How many nodes before those that a tile stores it begins."""
        return self.reach if self.both else 0


class Network(NamedTuple):
    """The second layers of the edge network, ``scalar_weight_HSX``, ``scalar_bias_HS`` and, at rank r > 0,
    ``lambda_weight_HYX``, ``lambda_bias_HY`` with Y = r·K."""

    scalar_weight: Tensor
    scalar_bias: Tensor
    lambda_weight: Tensor | None
    lambda_bias: Tensor | None

    def rank(self, head_width: int) -> int:
        return 0 if self.lambda_weight is None else self.lambda_weight.shape[1] // head_width


def checked(ends: Ends, network: Network, precision: str) -> tuple[Ends, Network]:
    """Return ends and network as the kernels read them: features lead, nodes are contiguous, both ends of an edge have
    one dtype. Errors: ``ValueError`` for sizes that the kernels are not made for."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision} is not one of {', '.join(PRECISIONS)}")
    head_width, num_hidden = ends.own.shape[1], ends.source.shape[1]
    sizes = {
        "window": ends.reach,
        "rank": network.rank(head_width),
        "hidden": num_hidden,
        "head width": head_width,
    }
    for name, size in sizes.items():
        if size > LARGEST[name]:
            raise ValueError(
                f"consensus' kernels are made for a {name} up to {LARGEST[name]}, got {size}; impl=reference takes any"
            )
    nodes = {}
    for pair in (("own", "other"), ("source", "target")):  # a kernel reads either by one pointer: they share a dtype
        dtype = torch.promote_types(*(getattr(ends, name).dtype for name in pair))
        nodes |= {name: _features_lead(getattr(ends, name).to(dtype)) for name in pair}
    masks = {name: getattr(ends, name) for name in ("own_mask", "other_mask")}
    bytes_of = {name: None if mask is None else mask.contiguous().view(torch.uint8) for name, mask in masks.items()}
    weights = {name: None if w is None else w.contiguous() for name, w in zip(network._fields, network, strict=True)}
    turn = None if ends.turn is None else ends.turn.to(wide_of(nodes["own"])).contiguous()
    return ends._replace(**nodes, **bytes_of, turn=turn), network._replace(**weights)


def _features_lead(x_HFBN: Tensor) -> Tensor:
    """Return the tensor with (F, B, N) contiguous; heads may be any distance apart."""
    features, batch, nodes = x_HFBN.shape[1:]
    return x_HFBN if x_HFBN.stride()[1:] == (batch * nodes, nodes, 1) else x_HFBN.contiguous()


class Tiles(NamedTuple):
    """The pieces in which a launch computes. Sizes of blocks are powers of two, 16 at least, as products need them.

    - ``nodes``: M of a tile, ``halo`` of them before those that it stores; ``num_own`` in a sequence.
    - ``width``: head width; ``hidden`` of ``num_hidden`` features of the hidden layer at a time.
    - ``rows``: of Λ at a time, of ``rank``; ``weight_rows`` in the kernel that sums their weights' gradients, where a
      program holds these.
    """

    nodes: int
    halo: int
    num_own: int
    width: int
    hidden: int
    num_hidden: int
    rows: int
    weight_rows: int
    rank: int

    @property
    def count(self) -> int:
        """How many tiles cover a sequence."""
        return triton.cdiv(self.num_own, self.nodes - self.halo)

    @property
    def count_without_halo(self) -> int:
        return triton.cdiv(self.num_own, self.nodes)

    @property
    def all_hidden(self) -> int:
        return _block(self.num_hidden)

    def groups(self, rows: int) -> int:
        """Return how many times ``rows`` rows of Λ make all; 1 without Λ, for α alone."""
        return triton.cdiv(max(self.rank, 1), rows)

    def parts(self, batch: int, heads: int) -> int:
        """Return into how many parts the sums of weights' gradients are cut: enough programs for a large GPU, and the
        same on every one."""
        programs = heads * self.groups(self.weight_rows)
        return max(1, min(self.count_without_halo * batch, triton.cdiv(PROGRAMS, programs)))


def tiles_of(num_own: int, halo: int, head_width: int, num_hidden: int, rank: int) -> Tiles:
    """Return the pieces for some sizes. A tile is at least four times as long as its halo."""
    width, of_rank = _block(head_width), triton.next_power_of_2(max(rank, 1))
    nodes = max(_block(4 * halo), min(LONGEST, _block(num_own)))
    rows = max(1, min(COLUMNS // width, of_rank))
    weight_rows = max(1, min(rows, HELD // (width * _block(num_hidden))))
    return Tiles(nodes, halo, num_own, width, min(SLAB, _block(num_hidden)), num_hidden, rows, weight_rows, rank)


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def tiles_for(ends: Ends, network: Network) -> Tiles:
    """Return the pieces for these tensors."""
    head_width, num_hidden = ends.own.shape[1], ends.source.shape[1]
    return tiles_of(ends.own.shape[-1], ends.halo, head_width, num_hidden, network.rank(head_width))


def settings(ends: Ends, tiles: Tiles, precision: str) -> dict[str, Any]:
    """Return the compile-time settings that all kernels share."""
    wide = wide_of(ends.own)
    return {
        "BOTH": ends.both,
        "COMPLETE": ends.window is None,
        "OWN_MASKED": ends.own_mask is not None,
        "OTHER_MASKED": ends.other_mask is not None,
        "TURNED": ends.turn is not None,
        "RANKED": tiles.rank > 0,
        "M": tiles.nodes,
        "K": tiles.width,
        "X": tiles.hidden,
        "ROWS": tiles.rows,
        "WIDE": tl.float64 if wide == torch.float64 else tl.float32,
        "MATRIX": tl.bfloat16 if precision == "bf16" else tl.float64 if wide == torch.float64 else tl.float32,
        "PRECISION": "ieee" if precision == "bf16" else precision,
        "SMALLEST": torch.finfo(wide).tiny ** (1 / 3),
        "num_warps": NUM_WARPS,
    }


def wide_of(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which sums are taken: float64 of float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def arguments(ends: Ends, network: Network, tiles: Tiles) -> dict[str, Any]:
    """Return the tensors and sizes that all kernels take, by name. A tensor that is left out is another one, which is
    then not read."""
    scalar_weight, rank = network.scalar_weight, tiles.rank
    return {
        "own": ends.own,
        "other": ends.other,
        "source": ends.source,
        "target": ends.target,
        "scalar_weight": scalar_weight,
        "scalar_bias": network.scalar_bias,
        "lambda_weight": network.lambda_weight if rank else scalar_weight,
        "lambda_bias": network.lambda_bias if rank else scalar_weight,
        "own_mask": scalar_weight if ends.own_mask is None else ends.own_mask,
        "other_mask": scalar_weight if ends.other_mask is None else ends.other_mask,
        "turn": scalar_weight if ends.turn is None else ends.turn,
        "own_head": ends.own.stride(0),
        "other_head": ends.other.stride(0),
        "source_head": ends.source.stride(0),
        "target_head": ends.target.stride(0),
        "heads": ends.own.shape[0],
        "batch": ends.own.shape[2],
        "num_own": ends.own.shape[3],
        "num_other": ends.other.shape[3],
        "num_tiles": tiles.count,
        "num_steps": ends.num_steps,
        "window": ends.reach,
        "rank": rank,
        "head_width": ends.own.shape[1],
        "num_hidden": ends.source.shape[1],
        "num_targets": 0 if ends.turn is None else ends.turn.shape[-1],
    }


def num_programs(ends: Ends, tiles: Tiles) -> int:
    """Return how many programs compute a tile each."""
    heads, _, batch, _ = ends.own.shape
    return heads * batch * tiles.count


def empty(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an output that a kernel fills."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
