"""Prepare the consensus kernels' arguments: sizes, strides and tile shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PRECISIONS = ("ieee", "tf32x3", "tf32", "bf16")
LARGEST = {"window": 16, "rank": 16, "hidden": 256, "head width": 128}
LONGEST = 64  # nodes of a tile, unless its halo needs more
COLUMNS = 256  # of Λ in a program at once
SLAB = 16  # features of the hidden layer at once
CHUNK_BYTES = 1 << 27  # of the edges whose gradients by Λ and hidden layers are stored at once
NUM_WARPS = 8
NUM_STAGES = 2


class Ends(NamedTuple):
    """The edges' two ends: signals, parts of the edge network, and masks.

    ``own_HKBN, other_HKBJ, source_HXBN, target_HXBJ, own_mask_BN, other_mask_BJ``; masks are bool or None. ``both``:
    the other end is in the same sequence, with edges in both directions. ``window``: None for every i → j.
    ``turn_2KJ``: cosine and signed sine, [cos; cos] and [−sin; sin], of the rotation by each target, to rotate
    disagreements back; None: no rotation.
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

    def swap(self) -> Ends:
        """Return the ends with source and target exchanged."""
        return Ends(
            self.other, self.own, self.target, self.source, self.other_mask, self.own_mask, self.both, self.window,
            self.turn,
        )  # fmt: skip

    @property
    def reach(self) -> int:
        """The largest distance within the window; 0 without a window."""
        return 0 if self.window is None else max(0, min(self.window, max(self.own.shape[-1], self.other.shape[-1]) - 1))

    @property
    def num_steps(self) -> int:
        """The number of edges per node in a kernel's loop."""
        if self.window is None:
            return self.other.shape[-1]
        return self.reach if self.both else 2 * self.reach + 1

    @property
    def halo(self) -> int:
        """The number of additional nodes before a tile."""
        return self.reach if self.both else 0


class Network(NamedTuple):
    """The edge network's second layers.

    ``scalar_weight_HSX``, ``scalar_bias_HS`` and, at rank r > 0, ``lambda_weight_HYX``, ``lambda_bias_HY`` with Y =
    r·K.
    """

    scalar_weight: Tensor
    scalar_bias: Tensor
    lambda_weight: Tensor | None
    lambda_bias: Tensor | None

    def rank(self, head_width: int) -> int:
        return 0 if self.lambda_weight is None else self.lambda_weight.shape[1] // head_width


def check_inputs(ends: Ends, network: Network, precision: str) -> tuple[Ends, Network]:
    """Return ends and network in the kernels' layout and dtypes.

    Features lead, nodes are contiguous.

    Args:
        ends: the edges' ends.
        network: the second layers.
        precision: one of `PRECISIONS`.

    Raises:
        ValueError: unsupported sizes or precision.
    """
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
    for pair in (("own", "other"), ("source", "target")):  # a kernel reads both through one pointer, so with one dtype
        dtype = torch.promote_types(*(getattr(ends, name).dtype for name in pair))
        nodes |= {name: _features_lead(getattr(ends, name).to(dtype)) for name in pair}
    masks = {name: getattr(ends, name) for name in ("own_mask", "other_mask")}
    bytes_of = {name: None if mask is None else mask.contiguous().view(torch.uint8) for name, mask in masks.items()}
    weights = {name: None if w is None else w.contiguous() for name, w in zip(network._fields, network, strict=True)}
    turn = None if ends.turn is None else ends.turn.to(wide_of(nodes["own"])).contiguous()
    return ends._replace(**nodes, **bytes_of, turn=turn), network._replace(**weights)


def _features_lead(x_HFBN: Tensor) -> Tensor:
    """Return the tensor with contiguous (F, B, N); any stride between heads."""
    features, batch, nodes = x_HFBN.shape[1:]
    return x_HFBN if x_HFBN.stride()[1:] == (batch * nodes, nodes, 1) else x_HFBN.contiguous()


class Tiles(NamedTuple):
    """A launch's tile sizes, powers of two and at least 16 for products.

    - ``nodes``: M per tile, including ``halo`` not stored; ``num_own`` per sequence.
    - ``width``: head width; ``hidden`` of ``num_hidden`` hidden features at a time.
    - ``rows`` of ``rank`` rows of Λ at a time.
    """

    nodes: int
    halo: int
    num_own: int
    width: int
    hidden: int
    num_hidden: int
    rows: int
    rank: int

    @property
    def count(self) -> int:
        """The number of tiles per sequence."""
        return triton.cdiv(self.num_own, self.nodes - self.halo)

    @property
    def count_without_halo(self) -> int:
        return triton.cdiv(self.num_own, self.nodes)

    @property
    def all_hidden(self) -> int:
        return _block(self.num_hidden)

    @property
    def groups(self) -> int:
        """The number of groups of Λ's rows; 1 without Λ, for α alone."""
        return triton.cdiv(max(self.rank, 1), self.rows)


def tiles_of(num_own: int, halo: int, head_width: int, num_hidden: int, rank: int, wide: int = 4) -> Tiles:
    """Return the tile sizes; a tile is at least four times as long as its halo.

    Small in float64, whose products are sums of a tile (M, X, ROWS·K).

    Args:
        num_own: nodes per sequence.
        halo: additional nodes before a tile.
        head_width: d_H.
        num_hidden: ξ.
        rank: r.
        wide: bytes of a sum.
    """
    width, of_rank = _block(head_width), triton.next_power_of_2(max(rank, 1))
    longest, slab, columns = (LONGEST, SLAB, COLUMNS) if wide == 4 else (16, 16, 16)
    nodes = max(_block(4 * halo), min(longest, _block(num_own)))
    rows = max(1, min(columns // width, of_rank))
    return Tiles(nodes, halo, num_own, width, min(slab, _block(num_hidden)), num_hidden, rows, rank)


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def tiles_for(ends: Ends, network: Network) -> Tiles:
    """Return the tile sizes for these tensors."""
    head_width, num_hidden = ends.own.shape[1], ends.source.shape[1]
    wide = wide_of(ends.own).itemsize
    return tiles_of(ends.own.shape[-1], ends.halo, head_width, num_hidden, network.rank(head_width), wide)


def settings(ends: Ends, tiles: Tiles, precision: str) -> dict[str, Any]:
    """Return the compile-time constants shared by all kernels.

    Args:
        ends: the edges' ends.
        tiles: tile sizes.
        precision: one of `PRECISIONS`.
    """
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
        # no tile of W_Λ is padded, and loads need no masks
        "EVEN": tiles.num_hidden == tiles.all_hidden
        and (tiles.rank == 0 or (ends.own.shape[1] == tiles.width and tiles.rank % tiles.rows == 0)),
        "WIDE": tl.float64 if wide == torch.float64 else tl.float32,
        "MATRIX": tl.bfloat16 if precision == "bf16" else tl.float64 if wide == torch.float64 else tl.float32,
        "PRECISION": "ieee" if precision == "bf16" else precision,
        "SMALLEST": torch.finfo(wide).tiny ** (1 / 3),
        "num_warps": NUM_WARPS,
        "num_stages": NUM_STAGES,
    }


def chunk_sizes(steps: int, batch: int, heads: int, step_bytes: int) -> tuple[int, int, int]:
    """Return a chunk's steps, sequences and heads: at most `CHUNK_BYTES`, or one of each.

    Args:
        steps: edges per node.
        batch: sequences.
        heads: heads.
        step_bytes: bytes of one head's, sequence's and step's edges.
    """
    room, sizes = CHUNK_BYTES // max(step_bytes, 1), []
    for number in (steps, batch, heads):
        sizes.append(max(1, min(number, room)))
        room //= sizes[-1]
    return sizes[0], sizes[1], sizes[2]


def wide_of(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def arguments(ends: Ends, network: Network, tiles: Tiles, precision: str) -> dict[str, Any]:
    """Return the tensors and sizes shared by all kernels, by name.

    Missing tensors are replaced by placeholders, never read.

    Args:
        ends: the edges' ends.
        network: the second layers.
        tiles: tile sizes.
        precision: "bf16" rounds W_Λ.
    """
    scalar_weight, lambda_weight, rank = network.scalar_weight, network.lambda_weight, tiles.rank
    if precision == "bf16" and lambda_weight is not None:
        lambda_weight = lambda_weight.bfloat16()
    return {
        "own": ends.own,
        "other": ends.other,
        "source": ends.source,
        "target": ends.target,
        "scalar_weight": scalar_weight,
        "scalar_bias": network.scalar_bias,
        "lambda_weight": lambda_weight if rank else scalar_weight,
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
    """Return the number of programs, one tile each."""
    heads, _, batch, _ = ends.own.shape
    return heads * batch * tiles.count


def empty(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised output.

    Args:
        shape: of the output.
        like: tensor with the same device.
        dtype: None: as ``like``.
    """
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
