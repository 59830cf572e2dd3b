"""Launch the consensus kernels, one pass over the edges each, and allocate outputs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kernels._consensus_backward import ends_kernel, weights_kernel
from kernels._consensus_forward import flow_kernel
from kernels._consensus_launch import (
    Ends,
    Network,
    arguments,
    chunk_sizes,
    empty,
    num_programs,
    settings,
    tiles_for,
    wide_of,
)
from kernels._consensus_taylor import flow_along_kernel
from kernels._large_products import multiply
from kernels.operation import Component, Parts


def _launch(kernel: Any, num_programs: int, **given: Any) -> None:
    kernel[(num_programs,)](**given)


def flow(ends: Ends, network: Network, precision: str) -> Tensor:
    """Return g (H, K, B, N).

    Args:
        ends: the edges' ends.
        network: the second layers.
        precision: of products with W_Λ.
    """
    tiles, out = tiles_for(ends, network), empty(ends.own.shape, ends.own)
    _launch(
        flow_kernel,
        num_programs(ends, tiles),
        **arguments(ends, network, tiles, precision),
        out=out,
        **settings(ends, tiles, precision),
    )
    return out


def compute_end_gradients(
    gradient: Tensor, ends: Ends, network: Network, precision: str, *, from_own: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients by the own nodes' signal and edge-network parts.

    The parts as sources and, for edges in both directions, as targets.

    Args:
        gradient: dL/dg.
        ends: the edges' ends.
        network: the second layers.
        precision: of products with W_Λ.
        from_own: whether g belongs to the own nodes; else to the other ends.
    """
    tiles, (heads, _, batch, num_own) = tiles_for(ends, network), ends.own.shape
    of_hidden = (heads, tiles.num_hidden, batch, num_own)
    given = arguments(ends, network, tiles, precision)
    by_own = empty(ends.own.shape, ends.own)
    by_source = empty(of_hidden, gradient, wide_of(ends.own)).zero_()
    by_target = empty(of_hidden, gradient, wide_of(ends.own)).zero_() if ends.both else by_source
    _launch(
        ends_kernel,
        num_programs(ends, tiles),
        **given,
        turned_weight=given["lambda_weight"].mT.contiguous() if tiles.rank else given["lambda_weight"],
        gradient=gradient,
        by_own=by_own,
        by_source=by_source,
        by_target=by_target,
        FROM_OWN=from_own or ends.both,
        FROM_OTHER=not from_own or ends.both,
        **settings(ends, tiles, precision),
    )
    return by_own, by_source.to(ends.source.dtype), by_target.to(ends.target.dtype) if ends.both else None


def compute_network_gradients(gradient: Tensor, ends: Ends, network: Network, precision: str) -> tuple[Component, ...]:
    """Return the gradients by the network's four tensors, summed over the programs' parts.

    Args:
        gradient: dL/dg.
        ends: the edges' ends.
        network: the second layers.
        precision: of products with W_Λ.
    """
    tiles, num_own = tiles_for(ends, network), ends.own.shape[-1]
    wide, num_scalars = wide_of(ends.own), network.scalar_weight.shape[1]
    of_lambda, directions = tiles.rank * ends.own.shape[1], 2 if ends.both else 1
    totals = [None if each is None else torch.zeros_like(each, dtype=wide) for each in network]
    for some_heads, sequences, steps in _chunks(ends, (of_lambda + tiles.num_hidden) * wide.itemsize):
        count, num_edges = len(some_heads), len(steps) * directions * len(sequences) * num_own
        num_tiles, is_ranked = tiles.count_without_halo, tiles.rank > 0
        parts = {
            "by_scalar_weight": (len(sequences) * num_tiles, count, num_scalars, tiles.num_hidden),
            "by_scalar_bias": (len(sequences) * num_tiles, count, num_scalars),
            "by_lambda": (count, of_lambda, num_edges if is_ranked else 0),
            "hidden": (count, tiles.num_hidden, num_edges if is_ranked else 0),
        }
        found = {name: empty(shape, gradient, wide) for name, shape in parts.items()}
        _launch(
            weights_kernel,
            num_tiles * len(sequences) * count,
            **arguments(ends, network, tiles, precision) | {"num_tiles": num_tiles, "num_steps": len(steps)},
            **found,
            gradient=gradient,
            first_head=some_heads.start,
            first_sequence=sequences.start,
            first_step=steps.start,
            some_heads=count,
            some_sequences=len(sequences),
            ALL_X=tiles.all_hidden,
            **settings(ends, tiles, precision),
        )
        sums = [found["by_scalar_weight"].sum(0), found["by_scalar_bias"].sum(0)]
        if is_ranked:
            dtype = torch.bfloat16 if precision == "bf16" else wide
            by_weight = multiply(found["by_lambda"].to(dtype), found["hidden"].to(dtype).mT)
            sums += [by_weight, found["by_lambda"].sum(-1)]
        for total, part in zip(totals, sums, strict=False):
            assert total is not None
            total[some_heads.start : some_heads.stop] += part
    return tuple(
        None if total is None or like is None else total.to(like.dtype)
        for total, like in zip(totals, network, strict=True)
    )


def _chunks(ends: Ends, edge_bytes: int) -> Iterator[tuple[range, range, range]]:
    """Yield the heads, sequences and steps of each chunk of edges."""
    heads, _, batch, num_own = ends.own.shape
    axes = ends.num_steps, batch, heads
    sizes = chunk_sizes(*axes, edge_bytes * (2 if ends.both else 1) * num_own)
    steps, sequences, of_heads = (
        [range(first, min(first + size, number)) for first in range(0, number, size)]
        for number, size in zip(axes, sizes, strict=True)
    )
    yield from product(of_heads, sequences, steps)


def flow_along(derivatives: tuple[Ends, Ends], networks: tuple[Network, ...], ends: Ends, precision: str) -> Parts:
    """Return g, g′ and g″.

    Args:
        derivatives: the ends' first and second derivatives, in the layout of ``ends``.
        networks: the network and its two derivatives; None is zero.
        ends: the edges' ends.
        precision: of products with W_Λ.
    """
    network, tiles = networks[0], tiles_for(ends, networks[0])
    stacked = {name: _stack([getattr(part, name) for part in networks]) for name in Network._fields}
    weights = {name: weight for name, weight in stacked.items() if weight is not None}
    outs = [empty(ends.own.shape, ends.own) for _ in range(3)]
    names = ("own", "other", "source", "target")
    nodes = {
        f"{name}{order}": part
        for order, of_order in enumerate(derivatives, 1)
        for name, part in zip(names, of_order[:4], strict=True)
    }
    _launch(
        flow_along_kernel,
        num_programs(ends, tiles),
        **arguments(ends, network, tiles, "ieee") | weights,
        **nodes,
        out=outs[0],
        out1=outs[1],
        out2=outs[2],
        SECOND=networks[2].lambda_weight is not None,
        **settings(ends, tiles, precision),
    )
    return outs[0], outs[1], outs[2]


def _stack(parts: list[Component]) -> Component:
    """Return a weight's value and two derivatives along a new leading axis, or None."""
    value = parts[0]
    return None if value is None else torch.stack([torch.zeros_like(value) if p is None else p for p in parts])
