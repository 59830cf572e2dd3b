"""Show the progress of a measurement: one bar in a terminal, else one line per task."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from stability.printable import print_text


def follow(tasks: Iterable[Iterator[None]], labels: Sequence[str], lengths: Sequence[int]) -> None:
    """Run the tasks one after another under one progress bar.

    If the output is no terminal, print a line per finished task instead.

    Args:
        tasks: each yields once a step.
        labels: name of each task.
        lengths: planned steps of each task; a task may have fewer (no paper state for SGD, no checkpoint).
    """
    from rich import get_console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    named = (
        (f"{number}/{len(labels)} {label}", steps)
        for number, (steps, label) in enumerate(zip(tasks, labels, strict=True), 1)
    )
    if not get_console().is_terminal:
        _follow_in_lines(named)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=sum(lengths), visible=bool(lengths))
        for number, (name, steps) in enumerate(named, 1):
            progress.update(bar, description=name)
            for _ in steps:
                progress.advance(bar)
            progress.update(bar, completed=sum(lengths[:number]))


def _follow_in_lines(named: Iterable[tuple[str, Iterator[None]]]) -> None:
    """Run the tasks and print a line for each: files and CI logs cannot show a bar."""
    start = time.monotonic()
    for name, steps in named:
        for _ in steps:
            pass
        print_text(f"{name}, {time.monotonic() - start:.0f} s", flush=True)
