"""Launch the kernels of consensus: one pass over the edges each, outputs allocated here."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels._consensus_backward import ends_kernel, weights_kernel
from kernels._consensus_forward import flow_kernel
from kernels._consensus_launch import (
    NUM_WARPS,
    Ends,
    Network,
    arguments,
    empty,
    num_programs,
    tile_settings,
    wide_of,
)
from kernels._consensus_taylor import flow_along_kernel
from kernels.operation import Component, Parts


def flow(ends: Ends, network: Network, precision: str) -> Tensor:
    """Return g (H, K, B, N)."""
    out = empty(ends.own.shape, ends.own)
    flow_kernel[(num_programs(ends),)](
        **arguments(ends, network), out=out, **tile_settings(ends, network, precision), num_warps=NUM_WARPS
    )
    return out


def by_ends(
    gradient: Tensor, ends: Ends, network: Network, precision: str, *, from_own: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients by the own signal and by what the own nodes give as sources and, where edges go both ways, as
    targets. ``from_own``: whether g is that of the own nodes; else of the other ends."""
    wide, (heads, _, batch, num_own) = wide_of(ends.own), ends.own.shape
    of_hidden = (heads, ends.source.shape[1], batch, num_own)
    by_own = empty(ends.own.shape, ends.own)
    by_source = torch.zeros(of_hidden, dtype=wide, device=gradient.device)
    by_target = torch.zeros_like(by_source) if ends.both else by_source
    ends_kernel[(num_programs(ends),)](
        **arguments(ends, network),
        gradient=gradient,
        by_own=by_own,
        by_source=by_source,
        by_target=by_target,
        FROM_OWN=from_own or ends.both,
        FROM_OTHER=not from_own or ends.both,
        **tile_settings(ends, network, precision),
        num_warps=NUM_WARPS,
    )
    return by_own, by_source.to(ends.source.dtype), by_target.to(ends.target.dtype) if ends.both else None


def by_network(gradient: Tensor, ends: Ends, network: Network, precision: str) -> tuple[Component, ...]:
    """Return the gradients by the four tensors of the network, each the sum of the programs' parts."""
    wide, head_width = wide_of(ends.own), ends.own.shape[1]
    settings, given = tile_settings(ends, network, precision), arguments(ends, network)
    heads, num_scalars, num_hidden = network.scalar_weight.shape
    rank = network.rank(head_width)
    all_hidden = max(16, triton.next_power_of_2(num_hidden))
    rows = max(1, min(settings["ROWS"], (1 << 14) // (settings["K"] * all_hidden)))
    num_groups, tiles = triton.cdiv(max(rank, 1), rows), triton.cdiv(ends.own.shape[-1], settings["M"])
    num_parts = max(1, min(tiles * ends.own.shape[2], triton.cdiv(264, heads * num_groups)))
    parts = [
        empty((num_parts, *shape), network.scalar_weight, wide)
        for shape in (
            (num_groups, heads, num_scalars, num_hidden),
            (num_groups, heads, num_scalars),
            (heads, rank * head_width, num_hidden),
            (heads, rank * head_width),
        )
    ]
    weights_kernel[(num_parts * num_groups * heads,)](
        **given | {"num_tiles": tiles},
        gradient=gradient,
        by_scalar_weight=parts[0],
        by_scalar_bias=parts[1],
        by_lambda_weight=parts[2],
        by_lambda_bias=parts[3],
        num_groups=num_groups,
        num_parts=num_parts,
        ALL_X=all_hidden,
        **settings | {"ROWS": rows},
        num_warps=NUM_WARPS,
    )
    of_scalars = [part.sum((0, 1)) for part in parts[:2]]
    of_lambda = [part.sum(0) for part in parts[2:]] if rank else [None, None]
    return tuple(
        None if total is None or like is None else total.to(like.dtype)
        for total, like in zip(of_scalars + of_lambda, network, strict=True)
    )


def flow_along(derivatives: tuple[Ends, Ends], networks: tuple[Network, ...], ends: Ends, precision: str) -> Parts:
    """Return g, g′ and g″. ``derivatives``: the ends' first and second ones, laid out as ``ends`` are; ``networks``: the
    network, its first and its second derivative, where None is zero."""
    network = networks[0]
    stacked = {name: _stacked([getattr(part, name) for part in networks]) for name in Network._fields}
    outs = [empty(ends.own.shape, ends.own) for _ in range(3)]
    names = ("own", "other", "source", "target")
    nodes = {
        f"{name}{order}": part
        for order, of_order in enumerate(derivatives, 1)
        for name, part in zip(names, of_order[:4], strict=True)
    }
    flow_along_kernel[(num_programs(ends),)](
        **arguments(ends, network) | {name: weight for name, weight in stacked.items() if weight is not None},
        **nodes,
        out=outs[0],
        out1=outs[1],
        out2=outs[2],
        SECOND=networks[2].lambda_weight is not None,
        **tile_settings(ends, network, precision),
        num_warps=NUM_WARPS,
    )
    return outs[0], outs[1], outs[2]


def _stacked(parts: list[Component]) -> Component:
    """Return value, first and second derivative of a weight along a new axis in front; None of none."""
    value = parts[0]
    return None if value is None else torch.stack([torch.zeros_like(value) if p is None else p for p in parts])
