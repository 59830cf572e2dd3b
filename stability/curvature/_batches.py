"""Count the rows of a batch made of tensors, and cut it into pieces of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def num_rows(batch: Any) -> int:
    """Return the first dimension that the batch's tensors share. ``batch``: a tensor, or tuples, lists and dicts of
    them; numbers and 0-d tensors go along.

    ValueError where there is no tensor or they differ.
    """
    sizes = {tensor.shape[0] for tensor in _tensors(batch)}
    if len(sizes) != 1:
        found = f"tensors of {sorted(sizes)} rows" if sizes else f"no tensor in a {type(batch).__name__}"
        raise ValueError(
            f"rows= needs a batch whose tensors share their first dimension (in tuples, lists, dicts); it has {found}"
        )
    return sizes.pop()


def split_rows(batch: Any, rows: int) -> list[Any]:
    """Return the batch in pieces of ``rows`` rows, the last one smaller; views. ValueError as in `num_rows`."""
    total = num_rows(batch)
    return [_mapped(lambda tensor, start=start: tensor[start : start + rows], batch) for start in range(0, total, rows)]


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if batch.ndim:
            yield batch
    elif isinstance(batch, (Mapping, tuple, list)):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(item)


def _mapped(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return function(batch) if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {key: _mapped(function, value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        items = [_mapped(function, item) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch
