"""Show every trial's state in a live table, or in log lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live

from stability.runs.words import Words
from sweeps.progress import OF_TEXT, Progress
from sweeps.trial import Trial
from sweeps.view.board import (
    Lines,
    SweepConsole,
    board,
    count_runs,
    counts_line,
    duration,
    left_text,
    print_line,
    verdicts_text,
)

POLL_S = 1.0


class LiveView:
    """Context manager for a table on the terminal, or `Lines` in a log.

    A thread refreshes it.

    Args:
        trials: the trials of the launch.
        num_skipped: number of trials already done.
        earlier: ended runs of the sweep; they count for the best result.
        opening: line above the table until the first trial runs; in a log the first line.
        is_done: whether a trained trial has all measurements.
        console: the console.
        words: the objective's words.
        expected: expected times by run id.

    Attributes:
        note: line above the table once set, e.g. on stopping the sweep.
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
        expected: Mapping[str, tuple[float, float]] | None = None,
    ):
        self.console = console or SweepConsole()
        self.progress = Progress(trials, is_done, earlier=earlier, words=words, expected=expected)
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
        elif self._opening:
            print_line(self.console, self._opening)
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
        finally:  # release the terminal even if a second Ctrl-C interrupts the wait
            if self._live:
                self._live.stop()

    def tick(self) -> None:
        """Refresh the view, at most once a second at any rate of calls."""
        if time.monotonic() - self._polled_at >= POLL_S:
            self._refresh()

    def summary(self) -> str:
        """Return a summary of the launch, including skipped and remaining runs.

        Example: ``"ended 36 runs in 4 min 12 s: 30 stable, 4 diverged, 2 failed"``.
        """
        verdicts = self.progress.verdicts()
        parts = verdicts_text(verdicts)
        num_left = len(self.progress.rows) - verdicts.total()
        text = f"ended {count_runs(verdicts.total())} in {duration(time.monotonic() - self._began)}" + (
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
                self._lines.print_changes(self.progress)

    def render(self) -> Group:
        """Return bar, counts, the grid of results and the table of runs, limited to the terminal's size."""
        note = self.note or ("" if self.progress.most_at_once else self._opening)
        skipped = f", {self._num_skipped} skipped" if self._num_skipped else ""
        times = (f"{duration(time.monotonic() - self._began)} elapsed", left_text(self.progress))
        lines = [(f"{counts_line(self.progress)}{skipped}", ""), (note, "yellow")]
        size = self.console.size
        # the cursor occupies the last line
        return board(self.progress, lines, size.height - 1, size.width, ", ".join(filter(None, times)))
