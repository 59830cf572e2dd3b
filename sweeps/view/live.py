"""Show what every trial of a sweep is doing in a live table, from the run directories; plain lines where there is no
terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live

from stability.runs.words import Words
from sweeps.progress import OF_TEXT, Progress
from sweeps.trial import Trial
from sweeps.view.board import (
    Lines,
    SweepConsole,
    best_line,
    board,
    counts_line,
    duration,
    left_text,
    print_line,
    runs,
    verdicts_text,
)

POLL_S = 1.0
LOW = 12  # lines of a terminal that has none to spare


class LiveView:
    """Show, within the ``with`` block, a table on the terminal or the lines of a log (`Lines`), refreshed by a thread
    of its own.

    ``is_done(trial)``: whether a trained trial's α_max is measured. ``opening`` stands above the table until the first
      trial runs, ``note`` (e.g. that the sweep is stopping) from when it is set. ``earlier``: runs of the sweep that
      had ended before, for what is best so far; ``words``: the objective's.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        *,
        num_skipped: int = 0,
        earlier: Sequence[Trial] = (),
        opening: str = "",
        is_done: Callable[[Trial], bool] = lambda trial: True,
        console: Console | None = None,
        words: Words = OF_TEXT,
    ):
        self.console = console or SweepConsole()
        self.progress = Progress(trials, is_done, earlier=earlier, words=words)
        self.note = ""
        self._opening = opening
        self._num_skipped = num_skipped
        self._lines = Lines(lambda line: print_line(self.console, line))
        self._lock = threading.Lock()
        self._began = self._polled_at = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._refresh_until_closed, name="live view", daemon=True)
        self._live = (
            Live(console=self.console, auto_refresh=False, transient=True) if self.console.is_terminal else None
        )

    def __enter__(self) -> LiveView:
        self._began = self._polled_at = time.monotonic()
        if self._live:
            self._live.start()
        self._refresh()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._closing.set()
            self._thread.join()
            self._refresh()
        finally:  # a second Ctrl-C may come while this waits; the terminal is given back all the same
            if self._live:
                self._live.stop()

    def tick(self) -> None:
        """Look at the runs, at most once a second: launchers call this as often as they like."""
        if time.monotonic() - self._polled_at >= POLL_S:
            self._refresh()

    def summary(self) -> str:
        """Say what the launch did, ``"ended 36 runs in 4 min 12 s: 30 stable, 4 diverged, 2 failed"``, with what was
        skipped and what is left."""
        verdicts = self.progress.verdicts()
        parts = verdicts_text(verdicts)
        num_left = len(self.progress.rows) - verdicts.total()
        text = f"ended {runs(verdicts.total())} in {duration(time.monotonic() - self._began)}" + (
            f": {parts}" if parts else ""
        )
        text += f"; skipped {self._num_skipped}" if self._num_skipped else ""
        return text + (f"; {num_left} left" if num_left else "")

    def _refresh_until_closed(self) -> None:
        while not self._closing.wait(POLL_S):
            self._refresh()

    def _refresh(self) -> None:
        with self._lock:
            self._polled_at = time.monotonic()
            self.progress.poll()
            if self._live:
                self._live.update(self.render(), refresh=True)
            else:
                self._lines.tell(self.progress)

    def render(self) -> Group:
        """Return counts, what is best so far, then the table, no higher than the terminal."""
        note = self.note or ("" if self.progress.most_at_once else self._opening)
        skipped = f", {self._num_skipped} skipped" if self._num_skipped else ""
        times = ", ".join(
            filter(None, (f"{duration(time.monotonic() - self._began)} elapsed", left_text(self.progress)))
        )
        best, size = best_line(self.progress), self.console.size
        together = "; ".join(filter(None, (times, best)))
        lines = [together] if len(together) <= size.width or size.height < LOW else [times, best]
        shown = [f"{counts_line(self.progress)}{skipped}", *lines]
        # the last line is the cursor's
        return board(self.progress, [*((line, "") for line in shown), (note, "yellow")], size.height - 1)
