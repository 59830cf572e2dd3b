"""Compute curvature under data parallelism: every rank evaluates its own share of the batch, and every rank gets the
numbers of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from stability.curvature._directional import Directional
from stability.curvature._inputs import mean_of
from stability.curvature._trees import Tree, any_tree
from stability.curvature.alpha_max import alpha_max
from stability.curvature.products import directional


@dataclass(frozen=True)
class _Part:
    """The share that one rank sends: the sums over its microbatches (inside ``sums``) and their counts, or why it has
    none."""

    sums: Directional | None
    count: float
    error: str | None = None


@any_tree
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
    """Compute `directional` of the loss over the batches of all ranks: L = Σ sum / Σ count, slope ⟨∇L, u⟩, curvature
    uᵀHu and α_max (Eq. 18) from these.

    One collective, of a few numbers in float64, summed in the order of the ranks: every rank returns the same bits, and
    they equal one process's over all batches to float64 rounding.

    Args:
        loss_fn: ``loss_fn(params, batch) -> (sum, count)``.
        params, direction, method, check: as in `directional`, the same on each rank.
        batches: the rank's own microbatches; a rank may hold nothing that counts.
        group: the ranks that call; None: all.

    Returns:
        The numbers of the whole batch. ``shares`` are summed, ``error_bar`` is the sum of the ranks' (an upper bound),
        ``rel_error`` the worst one, ``method`` joins the names where ranks differ.

    Raises:
        RuntimeError: another rank raised, and is named; its own error is raised there after the exchange, so that none
            waits for ever.
        ValueError, NoRule, NoSecondDerivative: as in `directional`.
    """
    items = list(enumerate(batches))
    counts: dict[int, float] = {}

    def sums_only(given: Mapping[str, Tensor], item: tuple[int, Any]) -> tuple[Any, float]:
        index, batch = item
        total, count = _pair(loss_fn(given, batch))
        counts[index] = float(count)
        return total, 1.0 if index == 0 else 0.0  # so that `directional` divides by one and returns the sums

    local, raised = None, None
    try:
        local = directional(sums_only, params, direction, method, batches=items, check=check)
        for count in counts.values():
            if not 0 <= count < float("inf"):
                raise ValueError(f"loss_fn(params, batch) returns (sum, count); it returned the count {count}")
    except Exception as error:  # noqa: BLE001  the other ranks wait for this one: tell them, then raise it
        raised = error
    part = _Part(local, sum(counts.values()), None if raised is None else f"{type(raised).__name__}: {raised}")
    parts = gathered(part, group)
    if raised is not None:
        raise raised
    return _whole(parts)


def parallel_mean(total: float, count: float, group: dist.ProcessGroup | None = None) -> float:
    """Compute Σ total / Σ count over ranks, in float64 and the same on each.

    Args:
        total: this rank's sum.
        count: this rank's count.
        group: the ranks that call; None: all.

    Raises:
        ValueError: the counts sum to 0.
    """
    parts = gathered((total, count), group)
    return mean_of(sum(part[0] for part in parts), sum(part[1] for part in parts))


def together(local: Callable[[], Any], group: dist.ProcessGroup) -> Any:
    """Return ``local()``; if it raises on one rank of ``group``, raise on each: the others would wait for ever."""
    result, raised = None, None
    try:
        result = local()
    except Exception as error:  # noqa: BLE001  told to the other ranks first
        raised = error
    errors = gathered(None if raised is None else f"{type(raised).__name__}: {raised}", group)
    if raised is not None:
        raise raised
    _raise_first(errors)
    return result


def _raise_first(errors: Sequence[str | None]) -> None:
    """Raise a RuntimeError that names the first rank with an error."""
    for rank, error in enumerate(errors):
        if error is not None:
            raise RuntimeError(f"another rank could not measure its part; rank {rank}: {error}")


def gathered(item: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return what each rank of ``group`` (None: all) gave, in their order; [item] in a process that belongs to no
    group."""
    if not (dist.is_available() and dist.is_initialized()):
        return [item]
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, item, group=group)
    return parts


def _whole(parts: Sequence[_Part]) -> Directional:
    """Add up the ranks' parts to the numbers of the whole batch; ``RuntimeError`` where a rank could not measure its
    own."""
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
        alpha_max(slope, curvature) if loss - loss == 0 else loss - loss,  # NaN where the loss is NaN or infinite
        "+".join(sorted({each.method for each in sums})),
        rel_error=max(errors_found) if errors_found else None,
        error_bar=None if any(bar is None for bar in bars) else mean_of(sum(bar or 0.0 for bar in bars), count),
        shares=shares if all(each.shares is not None for each in sums) else None,
        nonfinite=_first_of(parts, "nonfinite"),
        note=_first_of(parts, "note"),
    )


def _first_of(parts: Sequence[_Part], name: str) -> str | None:
    """Return the first rank's text of that name, with the rank."""
    texts = [getattr(part.sums, name) for part in parts]
    return next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), None)


def _pair(result: Any) -> Sequence[Any]:
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise ValueError(
            "loss_fn(params, batch) returns (sum, count), which ranks need to be weighed; it returned a "
            f"{type(result).__name__}"
        )
    return result
