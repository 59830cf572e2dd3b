"""Read and store data; here the progress bar, shown on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# callback (items, bytes) of the current bar; None without a bar
_advance: ContextVar[Callable[[int, int], None] | None] = ContextVar("advance", default=None)


@contextmanager
def bar(title: str, num_bytes: int | None = None, num_items: int | None = None) -> Iterator[None]:
    """Show the progress of `step` while the block runs.

    Args:
        title: text before the bar.
        num_bytes: total bytes, if known.
        num_items: total items, if known and ``num_bytes`` is not; without both, only a count is shown.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[items]:,} read"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task, seen = progress.add_task(title, total=num_bytes or num_items, items=0), {"items": 0, "bytes": 0}

        def advance(more_items: int, more_bytes: int) -> None:
            seen["items"] += more_items
            seen["bytes"] += more_bytes
            progress.update(task, completed=seen["bytes" if num_bytes else "items"], items=seen["items"])

        token = _advance.set(advance)
        try:
            yield
        finally:
            _advance.reset(token)


def step(items: int = 1, num_bytes: int = 0) -> None:
    """Report another document, or further bytes of a file, as read."""
    if (advance := _advance.get()) is not None:
        advance(items, num_bytes)
