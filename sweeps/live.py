"""The live table of a sweep: what every trial is doing, from the run directories; plain lines where there is no terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sweeps.progress import Progress, Row
from sweeps.trial import Trial

POLL_S = 1.0
STYLES = {"running": "cyan", "stable": "green", "spiked": "yellow", "plateaued": "yellow", "diverged": "magenta", "failed": "red", "queued": "dim"}
COLUMNS = ("mechanism", "LR", "seed", "step", "loss", "val NLL", "tokens/s", "ETA", "state")


class LiveView:
    """Within the ``with`` block a table on the terminal, or a line when a trial starts and a line when it ends, refreshed by a thread of its own.

    ``is_done(trial)``: whether a trained trial's α_max is measured. ``opening`` stands above the table until the first trial runs, ``note`` (e.g.
    that the sweep is stopping) from when it is set.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        *,
        num_skipped: int = 0,
        opening: str = "",
        is_done: Callable[[Trial], bool] = lambda trial: True,
        console: Console | None = None,
    ):
        self.console = console or Console()
        self.progress = Progress(trials, is_done)
        self.note = ""
        self._opening = opening
        self._num_skipped = num_skipped
        self._announced: dict[str, str] = {}
        self._lock = threading.Lock()
        self._began = self._polled_at = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._refresh_until_closed, name="live view", daemon=True)
        self._live = Live(console=self.console, auto_refresh=False, transient=True) if self.console.is_terminal else None

    def __enter__(self) -> LiveView:
        self._began = self._polled_at = time.monotonic()
        if self._live:
            self._live.start()
        self._refresh()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._closing.set()
            self._thread.join()
            self._refresh()
        finally:  # a second Ctrl-C may come while this waits; the terminal is given back all the same
            if self._live:
                self._live.stop()

    def tick(self) -> None:
        """For launchers to call as often as they like; looks at the runs at most once a second."""
        if time.monotonic() - self._polled_at >= POLL_S:
            self._refresh()

    def summary(self) -> str:
        """``"trained 36 runs in 4 min 12 s: 30 stable, 4 diverged, 2 failed"``, with what was skipped and what is left."""
        verdicts = self.progress.verdicts()
        parts = ", ".join(f"{count} {state}" for state, count in sorted(verdicts.items(), key=lambda item: list(STYLES).index(item[0])))
        num_left = len(self.progress.rows) - verdicts.total()
        text = f"ended {_runs(verdicts.total())} in {duration(time.monotonic() - self._began)}" + (f": {parts}" if parts else "")
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
                self._announce()

    def _announce(self) -> None:
        for row in self.progress.rows:
            if (row.running or row.ended) and row.trial.run_id not in self._announced:
                self._announced[row.trial.run_id] = "started"
                self._print(f"start  {row.trial.label} ({row.trial.run_id})")
            if row.ended and self._announced[row.trial.run_id] != "ended":
                self._announced[row.trial.run_id] = "ended"
                ended = sum(state == "ended" for state in self._announced.values())
                result = f" val NLL {row.val_nll:.3f}" if row.val_nll is not None else ""
                seconds = f" in {row.seconds:.1f} s" if row.seconds is not None else ""
                self._print(f"{row.state:6} {row.trial.label} ({row.trial.run_id}){result}{seconds} [{ended}/{len(self.progress.rows)}]")

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def render(self) -> Group:
        """Counts, then running trials, those that ended last, and those that wait, as many as the terminal is high."""
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for name in COLUMNS:
            table.add_column(name, justify="left" if name in ("mechanism", "state") else "right", no_wrap=True)
        lines = [Text(self._counts_line(), no_wrap=True, overflow="ellipsis")]
        if note := self.note or ("" if self.progress.most_at_once else self._opening):
            lines.append(Text(note, style="yellow", no_wrap=True, overflow="ellipsis"))
        height = max(1, self.console.size.height - len(lines) - 3)  # the header, the line that may say how many more, the cursor's
        rows = _in_order(self.progress.rows)
        for row in rows[:height]:
            table.add_row(*self._cells(row), style=STYLES[row.state])
        more = [Text(f"… and {len(rows) - height} more", style="dim")] if len(rows) > height else []
        return Group(*lines, table, *more)

    def _counts_line(self) -> str:
        counts, eta = self.progress.counts(), self.progress.eta_s()
        skipped = f", {self._num_skipped} skipped" if self._num_skipped else ""
        left = "" if not (counts["running"] or counts["queued"]) else f", {duration(eta)} left" if eta is not None else ", time left unknown yet"
        numbers = ", ".join(f"{counts[state]} {state}" for state in ("done", "running", "failed", "queued"))
        return f"{_runs(len(self.progress.rows))}: {numbers}{skipped}; {duration(time.monotonic() - self._began)} elapsed{left}"

    def _cells(self, row: Row) -> list[str]:
        eta = self.progress.row_eta_s(row) if row.running else None
        return [
            row.variant,
            f"{row.trial.spec['lr_peak']:g}",
            str(row.trial.spec["seed"]),
            f"{row.step}/{row.num_steps}",
            _number(row.loss, ".3f"),
            _number(row.val_nll, ".3f"),
            _number(row.tokens_per_s, ",.0f") if row.phase == "training" else "",
            duration(eta) if eta is not None else "",
            row.phase or row.state,
        ]


def _in_order(rows: Sequence[Row]) -> list[Row]:
    ended = sorted((row for row in rows if row.ended), key=lambda row: row.ended_at or 0.0, reverse=True)
    return [*(row for row in rows if row.running), *ended, *(row for row in rows if row.state == "queued")]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _runs(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"


def duration(seconds: float) -> str:
    """``"42 s"``, ``"4 min 12 s"``, ``"2 h 05 min"``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
