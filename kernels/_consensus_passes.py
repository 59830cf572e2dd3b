"""Launch the consensus kernels, one pass over the edges each, and allocate outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels._consensus_backward import ends_kernel, weights_kernel
from kernels._consensus_forward import flow_kernel
from kernels._consensus_launch import (
    Ends,
    Network,
    arguments,
    empty,
    num_programs,
    settings,
    tiles_for,
    wide_of,
)
from kernels._consensus_taylor import flow_along_kernel
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
        **arguments(ends, network, tiles),
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
    by_own = empty(ends.own.shape, ends.own)
    by_source = empty(of_hidden, gradient, wide_of(ends.own)).zero_()
    by_target = empty(of_hidden, gradient, wide_of(ends.own)).zero_() if ends.both else by_source
    _launch(
        ends_kernel,
        num_programs(ends, tiles),
        **arguments(ends, network, tiles),
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
    tiles, (heads, num_scalars, num_hidden) = tiles_for(ends, network), network.scalar_weight.shape
    num_groups, of_lambda = tiles.groups(tiles.weight_rows), tiles.rank * ends.own.shape[1]
    num_parts = tiles.parts(ends.own.shape[2], heads)
    shapes = {
        "by_scalar_weight": (num_parts, num_groups, heads, num_scalars, num_hidden),
        "by_scalar_bias": (num_parts, num_groups, heads, num_scalars),
        "by_lambda_weight": (num_parts, heads, of_lambda, num_hidden),
        "by_lambda_bias": (num_parts, heads, of_lambda),
    }
    parts = {name: empty(shape, gradient, wide_of(ends.own)) for name, shape in shapes.items()}
    _launch(
        weights_kernel,
        num_parts * num_groups * heads,
        **arguments(ends, network, tiles) | {"num_tiles": tiles.count_without_halo},
        **parts,
        gradient=gradient,
        num_groups=num_groups,
        num_parts=num_parts,
        ALL_X=tiles.all_hidden,
        **settings(ends, tiles, precision) | {"ROWS": tiles.weight_rows},
    )
    sums = [part.sum((0, 1) if "scalar" in name else 0) for name, part in parts.items()]
    return tuple(None if like is None else total.to(like.dtype) for total, like in zip(sums, network, strict=True))


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
        **arguments(ends, network, tiles) | {name: weight for name, weight in stacked.items() if weight is not None},
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
