"""Windowed self-consensus at the paper's 193 M sizes, as a layer with projections."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.kernel_cases.case import COMPILED, EAGER, OURS, Case, Promise, module_step
from kernels.roofline import Traffic
from stability.mechanisms import build

if TYPE_CHECKING:
    from kernels.consensus import Tiles

FLASH = "sa, SDPA"
LAUNCHES = ("forward", "ends_backward", "context_backward", "network_backward", "second_order")


def cases(smoke: bool) -> list[Case]:
    """Return the cases: the layer in TF32 and bfloat16, and a longer one beside attention of the same width.

    The short one in TF32 is there for each rotation of its disagreements (``rope``), the others for the default one.
    Tiny ones if ``smoke``.
    """
    width, heads, hidden = (32, 2, 16) if smoke else (768, 12, 256)
    short, long = (16, 24) if smoke else (1024, 8192)
    usual: dict[str, Any] = {"width": width, "heads": heads, "window": 2, "rank": 4, "edge_hidden": hidden}
    tokens = long if smoke else 8 * short
    found = []
    default = ("tf32", short, "gradient"), ("bf16", short, "gradient"), ("bf16", long, "gradient")
    for precision, positions, rope in (*default, ("tf32", short, "absolute"), ("tf32", short, "relative")):
        settings = usual | {"rope": rope}
        shape = (1 if smoke else tokens // positions, positions, width)
        contestants = {
            OURS: module_step(partial(build, "sc", impl="triton", **settings), *shape, precision=precision),
            EAGER: module_step(partial(build, "sc", **settings), *shape, precision=precision),
            COMPILED: module_step(partial(build, "sc", **settings), *shape, precision=precision, compiled=True),
            FLASH: module_step(
                lambda: build("sa", width=width, heads=heads, mask_diagonal=False), *shape, precision=precision
            ),
        }
        against_eager = (
            Promise(OURS, EAGER, 4, is_gain=True),
            Promise(OURS, COMPILED, 2, is_gain=True),
            Promise(OURS, EAGER, 0.2, quantity="memory"),
        )
        against_flash = (Promise(OURS, FLASH, 1.0),)
        promises = against_eager if positions == short else against_flash if precision == "bf16" else ()
        label = f"B={shape[0]} N={positions:,} d={width}{'' if rope == 'gradient' else f' {rope}'}"
        edges = {"window": 2, "rank": 4, "hidden": hidden, "turned": rope == "relative"}
        sizes = {"batch": shape[0], "heads": heads, "positions": positions, "head_width": width // heads, **edges}
        found.append(Case("consensus", label, contestants, partial(_both_passes, sizes), precision, promises))
    return found


def _both_passes(sizes: dict[str, Any]) -> Traffic:
    """Return the bytes and operations of both passes' launches, without the projections."""
    launches = ("forward", "ends_backward", "network_backward")
    # float32 under autocast, too, but for an edge's target: its rotation and its bias are
    return sum((traffic(launch, **sizes, itemsize=4) for launch in launches), Traffic(0, 0, 0))


@dataclass(frozen=True)
class _Launch:
    """Sizes of one launch; its own nodes are those with a stored g or gradient.

    For a context, own and other nodes are exchanged.
    """

    tiles: Tiles
    both: bool
    steps: int
    reach: int | None
    num_own: int
    num_other: int
    width: int
    hidden: int
    rank: int
    targets: int  # positions of the rotation's table; 0 without one

    @property
    def directions(self) -> int:
        return 2 if self.both else 1

    @property
    def scalars(self) -> int:
        return 2 if self.rank else 1

    @property
    def of_network(self) -> int:
        """Numbers in one head's second layers."""
        return (self.scalars + self.rank * self.width) * (self.hidden + 1)

    def rows(self, halo: int) -> int:
        """Return the rows with an edge, over all tiles and steps of a sequence."""
        return sum(self._edges(first, halo, step) for first in self._firsts(halo) for step in range(self.steps))

    def num_steps(self, halo: int) -> int:
        """Return the number of steps over all tiles of a sequence."""
        return len(self._firsts(halo)) * self.steps

    def _firsts(self, halo: int) -> range:
        count = self.tiles.count if halo else self.tiles.count_without_halo
        return range(-halo, count * (self.tiles.nodes - halo) - halo, self.tiles.nodes - halo)

    def _edges(self, first: int, halo: int, step: int) -> int:
        """Return the rows of the tile at ``first`` with both nodes of edge ``step``."""
        offset = step + 1 if self.both else None if self.reach is None else step - self.reach
        low, high = max(first, 0), min(first + self.tiles.nodes, self.num_own)
        if offset is not None:
            low, high = max(low, -offset), min(high, self.num_other - offset)
        return max(high - low, 0)

    def turns(self, rows: int) -> int:
        """Return the count of numbers read from the rotation's table for ``rows``."""
        return 2 * self.directions * rows * self.width if self.targets else 0

    def network(self, rows: int, steps: int, groups: int, nodes: int, orders: int = 1) -> int:
        """Return the count of numbers read by the edge network.

        It reads ``nodes`` tensors at both ends of the edges in ``rows``. In each step it reads its weights, value and
        derivatives (``orders``), α's and β's for each group of Λ's rows.
        """
        weights = orders * groups * self.scalars * (self.hidden + 1) + orders * self.rank * self.width * (
            self.hidden + 1
        )
        return self.directions * (rows * groups * 2 * nodes * self.hidden + steps * weights)

    def products(self, steps: int, groups: int, rows: int) -> int:
        """Return the multiply-adds of one product of Λ's rows with all hidden features.

        Blocks are filled up.
        """
        slabs = -(-self.hidden // self.tiles.hidden)
        columns = groups * rows * self.tiles.width if self.rank else 0
        return self.directions * steps * self.tiles.nodes * slabs * self.tiles.hidden * columns


def traffic(
    launch: str,
    *,
    batch: int,
    heads: int,
    positions: int,
    head_width: int,
    hidden: int,
    rank: int,
    window: int | None,
    context: int | None = None,
    itemsize: int = 4,
    wide: int = 4,
    once: bool = True,
    turned: bool = False,
) -> Traffic:
    """Return bytes and operations of one of `LAUNCHES` without masks.

    Args:
        launch: its name.
        batch: sequences.
        heads: heads per layer.
        positions: sequence length.
        head_width: features per head.
        hidden: the edge network's hidden features.
        rank: Λ's rank; 0 without.
        window: the graph's half width; None for a complete graph with a context.
        context: the context's length; None for self-consensus.
        itemsize: bytes of a node's number.
        wide: bytes of a weight or a sum.
        once: whether each buffer moves once (repeated reads hit a cache) and only edges count as operations: a lower
            bound for a launch's time. False: all loads, stores and multiplications.
        turned: whether disagreements are rotated.

    Raises:
        ValueError: unknown launch.
    """
    from kernels.consensus import tiles_of  # needs triton

    if launch not in LAUNCHES:
        raise ValueError(f"launch={launch} is not one of {', '.join(LAUNCHES)}")
    own, other = (context or 0, positions) if launch == "context_backward" else (positions, context or 0)
    both = context is None
    reach = None if window is None else min(window, max(own, other) - 1)
    halo = reach or 0 if both else 0
    steps = (reach or 0) if both else other if reach is None else 2 * reach + 1
    targets = (positions if both else context or 0) if turned else 0
    tiles = tiles_of(own, halo, head_width, hidden, rank, wide)
    sizes = _Launch(tiles, both, steps, reach, own, own if both else other, head_width, hidden, rank, targets)
    count = _moved_once if once else _moved
    return _times(count(launch, sizes, batch, heads, itemsize, wide), batch * heads)


def _times(one: Traffic, factor: int) -> Traffic:
    return Traffic(one.read * factor, one.written * factor, one.flops * factor)


def _moved_once(launch: str, at: _Launch, batch: int, heads: int, itemsize: int, wide: int) -> Traffic:
    """Return one head's and sequence's traffic, each buffer once, with the edges' operations.

    Weights are read, and their gradients written, once for all sequences.
    """
    ends = at.num_own + (0 if at.both else at.num_other)
    nodes = ends * at.width + (2 * at.num_own if at.both else ends) * at.hidden
    weights = at.of_network // batch + 2 * at.targets * at.width // (batch * heads)
    edges = at.directions * at.rows(0)
    product = 2 * edges * at.rank * at.width * at.hidden
    signal, of_hidden = at.num_own * at.width, at.num_own * at.hidden * at.directions
    gradient = (at.num_other if launch == "context_backward" else at.num_own) * at.width
    if launch == "forward":
        return Traffic(nodes * itemsize + weights * wide, signal * itemsize, product)
    if launch == "second_order":
        return Traffic(3 * (nodes * itemsize + weights * wide), 3 * signal * itemsize, 5 * product)
    read = (nodes + gradient) * itemsize + weights * wide
    if launch == "network_backward":
        return Traffic(read, at.of_network // batch * wide, 2 * product)
    return Traffic(read, (signal + of_hidden) * itemsize, 2 * product)


def _moved(launch: str, at: _Launch, batch: int, heads: int, itemsize: int, wide: int) -> Traffic:
    """Return the programs' loads, stores and multiplications for one head and sequence."""
    tiles, own = at.tiles, at.num_own
    if launch == "network_backward":
        return _moved_for_network(at, batch, heads, itemsize, wide)
    rows, steps, groups = at.rows(tiles.halo), at.num_steps(tiles.halo), tiles.groups
    product = 2 * at.products(steps, groups, tiles.rows)
    if launch == "forward":
        nodes = rows * 2 * at.width + at.directions * rows * groups * 2 * at.hidden
        weights = at.network(0, steps, groups, 1) + at.turns(rows)
        return Traffic(nodes * itemsize + weights * wide, own * at.width * itemsize, product)
    if launch == "second_order":
        nodes = 3 * (rows * 2 * at.width + at.directions * rows * groups * 2 * at.hidden)
        # Λ's W″ is zero and not read
        weights = at.network(0, steps, groups, 1, 3) - at.directions * steps * at.rank * at.width * at.hidden
        weights += at.turns(rows)
        return Traffic(nodes * itemsize + weights * wide, 3 * own * at.width * itemsize, 5 * product)
    nodes = rows * (4 if at.both else 3) * at.width + 2 * at.directions * rows * groups * 2 * at.hidden
    weights = (
        at.network(0, steps, groups, 1) + at.directions * steps * (groups * at.scalars + at.rank * at.width) * at.hidden
    )
    weights += at.turns(rows)
    # every step that adds to gradients by the nodes' parts reads and writes them anew
    kept = (2 if at.both else 1) * at.directions * groups * at.steps * own * at.hidden
    return Traffic(nodes * itemsize + (weights + kept) * wide, own * at.width * itemsize + kept * wide, 2 * product)


def _moved_for_network(at: _Launch, batch: int, heads: int, itemsize: int, wide: int) -> Traffic:
    """Return the same for the launches before the product of W_Λ's gradient, which torch computes."""
    from kernels.consensus import chunk_sizes

    tiles, rows, steps = at.tiles, at.rows(0), at.num_steps(0)
    nodes = rows * (4 if at.both else 3) * at.width + at.directions * rows * (tiles.groups + 1) * 2 * at.hidden
    weights = at.network(0, steps, tiles.groups, 1) + at.turns(rows)
    edges, of_lambda = at.directions * at.steps * at.num_own, at.rank * at.width
    chunk = chunk_sizes(at.steps, batch, heads, at.directions * at.num_own * (of_lambda + at.hidden) * wide)
    parts = tiles.count_without_halo * -(-at.steps // chunk[0])
    stored = parts * at.scalars * (at.hidden + 1) + (edges * (of_lambda + at.hidden) if at.rank else 0)
    product = at.products(steps, tiles.groups, tiles.rows)
    return Traffic(nodes * itemsize + weights * wide, stored * wide, 2 * product)
