"""A progress bar over what a data source reads; on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# what to call with bytes and items that were read; nothing where no bar is shown
_advance: ContextVar[Callable[[int, int], None] | None] = ContextVar("advance", default=None)


@contextmanager
def bar(title: str, num_bytes: int | None = None, num_items: int | None = None) -> Iterator[None]:
    """Show how far `step` has come, of a number of bytes or of items (neither: only how many items), while the block
    runs."""
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
    """Tell that another document was read, or other bytes of a file."""
    if (advance := _advance.get()) is not None:
        advance(items, num_bytes)
