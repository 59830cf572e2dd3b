"""Curvature under data parallelism.

Each rank evaluates its own share of the batch, and gets the numbers of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from stability.curvature._directional import Directional
from stability.curvature._inputs import mean_of
from stability.curvature._trees import Tree, accept_any_tree
from stability.curvature.alpha_max import alpha_max
from stability.curvature.products import directional


@dataclass(frozen=True)
class _Part:
    """One rank's contribution.

    Attributes:
        sums: sums over its microbatches, or None after an error.
        count: sum of their counts.
        error: the error, or None.
    """

    sums: Directional | None
    count: float
    error: str | None = None


@accept_any_tree
def parallel_directional(
    loss_fn: Callable[..., Any],
    params: Tree,
    direction: Tree,
    method: str = "auto",
    *,
    batches: Iterable[Any],
    check: bool | None = None,
    group: dist.ProcessGroup | None = None,
) -> Directional:
    """Compute `directional` of the loss over the batches of all ranks.

    L = Σ sum / Σ count; slope ⟨∇L, u⟩, curvature uᵀHu and α_max (Eq. 18) follow. One collective exchanges a few float64
    numbers, summed in the order of the ranks. Every rank returns the same bits. They equal one process's result over
    all batches to float64 rounding.

    Args:
        loss_fn: ``loss_fn(params, batch) -> (sum, count)``.
        params: θ, as in `directional`, the same on each rank.
        direction: u, as in `directional`, the same on each rank.
        method: as in `directional`, the same on each rank.
        batches: the rank's own microbatches; their counts may be 0.
        check: as in `directional`, the same on each rank.
        group: the ranks that call; None: all.

    Returns:
        The numbers of the whole batch. ``shares`` are summed, ``error_bar`` is the ranks' sum (an upper bound),
        ``rel_error`` the largest one, ``method`` joins the names if ranks differ.

    Raises:
        RuntimeError: another rank raised; the message names it. Its own error is raised there after the exchange, so no
            rank waits for ever.
        ValueError: as in `directional`.
        NoRule: as in `directional`.
        NoSecondDerivative: as in `directional`.
    """
    items = list(enumerate(batches))
    counts: dict[int, float] = {}

    def evaluate_sums(given: Mapping[str, Tensor], item: tuple[int, Any]) -> tuple[Any, float]:
        index, batch = item
        total, count = _pair(loss_fn(given, batch))
        counts[index] = float(count)
        return total, 1.0 if index == 0 else 0.0  # then `directional` divides by 1 and returns the sums

    local, raised = None, None
    try:
        local = directional(evaluate_sums, params, direction, method, batches=items, check=check)
        for count in counts.values():
            if not 0 <= count < float("inf"):
                raise ValueError(f"loss_fn(params, batch) returns (sum, count); it returned the count {count}")
    except Exception as error:  # noqa: BLE001  the other ranks wait for this one: send it, then raise it
        raised = error
    part = _Part(local, sum(counts.values()), None if raised is None else f"{type(raised).__name__}: {raised}")
    parts = gather(part, group)
    if raised is not None:
        raise raised
    return _add_up(parts)


def parallel_mean(total: float, count: float, group: dist.ProcessGroup | None = None) -> float:
    """Compute Σ total / Σ count over ranks, in float64.

    The result is the same on each rank.

    Args:
        total: this rank's sum.
        count: this rank's count.
        group: the ranks that call; None: all.

    Raises:
        ValueError: the counts sum to 0.
    """
    parts = gather((total, count), group)
    return mean_of(sum(part[0] for part in parts), sum(part[1] for part in parts))


def run_together(local: Callable[[], Any], group: dist.ProcessGroup) -> Any:
    """Return ``local()``; if it raises on one rank of ``group``, raise on each.

    Otherwise the other ranks would wait for ever.
    """
    result, raised = None, None
    try:
        result = local()
    except Exception as error:  # noqa: BLE001  sent to the other ranks first
        raised = error
    errors = gather(None if raised is None else f"{type(raised).__name__}: {raised}", group)
    if raised is not None:
        raise raised
    _raise_first(errors)
    return result


def _raise_first(errors: Sequence[str | None]) -> None:
    """Raise a RuntimeError with the first rank's error, if any."""
    for rank, error in enumerate(errors):
        if error is not None:
            raise RuntimeError(f"another rank could not measure its part; rank {rank}: {error}")


def gather(item: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the items of all ranks of ``group`` (None: all), in their order.

    [item] in a process without a group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [item]
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, item, group=group)
    return parts


def _add_up(parts: Sequence[_Part]) -> Directional:
    """Add up the ranks' parts; raise a RuntimeError if a rank failed."""
    _raise_first([part.error for part in parts])
    sums = [part.sums for part in parts if part.sums is not None]
    count = sum(part.count for part in parts)
    loss, slope, curvature = (
        mean_of(sum(getattr(each, name) for each in sums), count) for name in ("loss", "slope", "curvature")
    )
    shares = {
        name: mean_of(sum((each.shares or {}).get(name, 0.0) for each in sums), count) for name in sums[0].shares or {}
    }
    bars, errors_found = (
        [each.error_bar for each in sums],
        [each.rel_error for each in sums if each.rel_error is not None],
    )
    return Directional(
        loss,
        slope,
        curvature,
        alpha_max(slope, curvature) if loss - loss == 0 else loss - loss,  # NaN if the loss is NaN or infinite
        "+".join(sorted({each.method for each in sums})),
        rel_error=max(errors_found) if errors_found else None,
        error_bar=None if any(bar is None for bar in bars) else mean_of(sum(bar or 0.0 for bar in bars), count),
        shares=shares if all(each.shares is not None for each in sums) else None,
        nonfinite=_first_of(parts, "nonfinite"),
        note=_first_of(parts, "note"),
    )


def _first_of(parts: Sequence[_Part], name: str) -> str | None:
    """Return the first text in the field ``name`` of the ranks, with its rank."""
    texts = [getattr(part.sums, name) for part in parts]
    return next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), None)


def _pair(result: Any) -> Sequence[Any]:
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise ValueError(
            "loss_fn(params, batch) returns (sum, count), which ranks need to be weighed; it returned a "
            f"{type(result).__name__}"
        )
    return result
