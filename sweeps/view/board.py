"""Format a sweep's progress as a line, a fitting table, or log lines."""

from __future__ import annotations

import math
import os
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stability.printable import visible
from stability.runs.directory import FINISHED, INTERRUPTED, STOPPED
from stability.runs.words import EXPLODED, LEARNED_NOTHING, ShareWords, is_exploded
from sweeps.progress import CURVATURE, SAMPLES, STALLED, Progress, Row

STYLES = {
    "running": "cyan",
    "stable": "green",
    "spiked": "yellow",
    LEARNED_NOTHING: "yellow",
    EXPLODED: "magenta",
    "diverged": "magenta",
    "failed": "red",
    STALLED: "red",
    INTERRUPTED: "blue",
    STOPPED: "blue",
    "queued": "dim",
}
SPEED = "speed"  # in the study's counted units per second
GRID, CELL, BAR_WIDTH = "val NLL, LR", 8, 30  # head of the grid's names; columns of a cell and of the bar
COLUMNS = ("mechanism", "LR", "seed", "step", "loss", "val NLL", SPEED, "ETA", "state")
GAP = 2  # spaces between columns, if there is room
DISPENSABLE = (SPEED, "loss", "seed")  # columns that a narrow terminal goes without, in this order
FOLD_WIDTH, FOLD_HEIGHT = 60, 12  # columns and lines of a terminal in which the counts may take two lines
LAST_ENDED = 6  # ended runs in the table if a sweep does not fit the terminal
AS_NEEDED = (STALLED, INTERRUPTED, STOPPED)  # states listed only if a run has them
# a log has a summary each minute, or after another 5 % of the runs (at least 4) have ended
PROGRESS_S, PROGRESS_PARTS, FEWEST_BETWEEN = 60.0, 20, 4


def counts_line(progress: Progress) -> str:
    """Count the runs by state.

    Example: ``"48 runs: 30 done (26 stable, 4 diverged), 2 running, 1 failed, 15 queued"``. Stalled, interrupted and
    stopped runs appear only if there are any.
    """
    counts = progress.counts()
    verdicts = verdicts_text(Counter(row.shown for row in progress.rows if row.state in FINISHED))
    standing = [row.stood_s for row in progress.rows if row.stood_s is not None]
    numbers = [f"{counts['done']} done" + (f" ({verdicts})" if verdicts else "")]
    numbers += [
        f"{counts[state]} {state}" + (_describe_standing(standing) if state == "running" else "")
        for state in ("running", *AS_NEEDED, "failed", "queued")
        if counts[state] or state not in AS_NEEDED
    ]
    return f"{count_runs(len(progress.rows))}: {', '.join(numbers)}"


def _describe_standing(seconds: Sequence[float]) -> str:
    """Return a note on runs long without a step: ``" (1 with no step for 4 min 00 s)"``; "" for none."""
    up_to = "up to " if len(seconds) > 1 else ""
    return f" ({len(seconds)} with no step for {up_to}{duration(max(seconds))})" if seconds else ""


# the slowest of the last steps over the fastest, from which the time left is said to be rough, or as a range
ABOUT, RANGE = 1.25, 2.0


def left_text(progress: Progress) -> str:
    """Return the time left, ``"4 min 12 s left"``; "" if everything has ended.

    If the last steps took unlike times, it is ``"about …"``, or a range; only the training's share varies. The text is
    ``"… of training left"`` until α_max and samples have been timed.
    """
    if all(row.ended for row in progress.rows):
        return ""
    eta = progress.eta_s()
    what = "left" if progress.is_timed_whole else "of training left"
    if eta is None:
        return "time left unknown yet"
    low, high = (progress.eta_s(factor) or 0.0 for factor in progress.swing())
    if high <= ABOUT * low:
        return f"{duration(eta)} {what}"
    return f"about {duration(eta)} {what}" if high <= RANGE * low else f"{duration(low)} to {duration(high)} {what}"


def best_line(progress: Progress) -> str:
    """Name each variant's best result, or "" before any run has ended with one.

    Example: ``"best val NLL so far: sa 2.881 at lr=0.003, sc 2.866 at lr=0.01 (2 seeds)"``.
    """
    found = progress.best()
    points = [
        f"{variant} {nll:.3f} at lr={lr:g}" + (f" ({count} seeds)" if count > 1 else "")
        for variant, (nll, lr, count) in sorted(found.items())
    ]
    return f"best val NLL so far: {', '.join(points)}" if points else ""


def verdicts_text(verdicts: Counter[str]) -> str:
    return ", ".join(
        f"{count} {state}" for state, count in sorted(verdicts.items(), key=lambda item: list(STYLES).index(item[0]))
    )


def board(progress: Progress, lines: Sequence[tuple[str, str]], height: int, width: int, times: str = "") -> Group:
    """Return the live view: a bar, heading lines, a grid of results and a table of runs.

    Queued runs are counted in one line. If the others do not fit, the table has the running and the last ended ones. A
    grid too large for the terminal gives way to a line with the best results.

    Args:
        progress: the runs.
        lines: (text, style) of each heading line; the first one, with the counts, may take two lines.
        height: maximum number of lines.
        width: columns of the terminal.
        times: text beside the bar.
    """
    given = [(visible(text), style) for text, style in lines if text]
    first = _fold(given[0][0], width) if given and height >= FOLD_HEIGHT else [text for text, _ in given[:1]]
    folded = [*((text, given[0][1]) for text in first), *given[1:]]
    heading = [Text(text, style=style, no_wrap=True, overflow="ellipsis") for text, style in folded]
    results: list[Any] = []
    if grid := grid_table(progress, width, (height - len(heading)) // 2):
        results = [grid]
    elif best := best_line(progress):
        results = [Text(visible(best), no_wrap=True, overflow="ellipsis")]
    used = 1 + len(heading) + (grid.row_count + 1 if grid else len(results))
    room = max(0, height - used - 2)  # two lines for the header and the count of hidden runs
    rows = [row for row in sort_rows(progress.rows) if row.state != "queued"]
    chosen = rows if len(rows) <= room else _collapse(rows, room)
    hidden = Counter("ended" if row.ended else row.state for row in progress.rows)
    hidden.subtract("ended" if row.ended else row.state for row in chosen)
    more = ", ".join(f"{count} {state}" for state, count in hidden.items() if count)
    last = [Text(f"… not shown: {more}", style="dim", no_wrap=True, overflow="ellipsis")] if more else []
    table = [run_table(progress, chosen, width)] if chosen else []
    return Group(_bar(progress.share_done(), times), *heading, *results, *table, *last)


def _fold(text: str, width: int) -> list[str]:
    """Return a heading as one line, or two if it fits these; a terminal below `FOLD_WIDTH` columns cuts it."""
    folded = textwrap.wrap(text, width) if width >= FOLD_WIDTH else []
    return folded if len(folded) == 2 else [text]


def _bar(share: float, times: str) -> Table:
    """Return one bar for the whole sweep, with its share of the work and the times."""
    bar = Table.grid(padding=(0, 1, 0, 0))
    for _ in range(2):
        bar.add_column(no_wrap=True, overflow="ellipsis")
    bar.add_row(ProgressBar(total=1.0, completed=share, width=BAR_WIDTH), Text(f"{share:.0%} {times}".rstrip()))
    return bar


def grid_table(progress: Progress, width: int, height: int) -> Table | None:
    """Return the median validation NLL by variant and learning rate, filled as runs end; None if it does not fit.

    A cell before its first result has the share of its steps; the best rate of a line is bold.

    Args:
        progress: the runs.
        width: columns of the terminal.
        height: maximum number of lines.
    """
    medians, best = progress.medians(), progress.best()
    rates = sorted({row.trial.spec["lr_peak"] for row in progress.rows}.union(*medians.values()))
    names = list(dict.fromkeys([*(row.variant for row in progress.rows), *medians]))
    needed = max(map(len, [GRID, *names])) + 2 + len(rates) * (CELL + 2)
    if len(rates) < 2 or needed > width or len(names) + 1 > height:
        return None
    cells: dict[tuple[str, float], list[Row]] = {}
    for row in progress.rows:
        cells.setdefault((row.variant, row.trial.spec["lr_peak"]), []).append(row)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(GRID, no_wrap=True)
    for lr in rates:
        table.add_column(f"{lr:g}", justify="right", no_wrap=True, min_width=CELL)
    for name in names:
        ended, untrained = medians.get(name, {}), progress.untrained_nll(name)
        texts = [_grid_cell(ended.get(lr), cells.get((name, lr), []), untrained) for lr in rates]
        styles = ["bold" if name in best and best[name][1] == lr else "" for lr in rates]
        table.add_row(Text(visible(name)), *map(Text, texts, styles))
    return table


def _grid_cell(ended: tuple[float, int] | None, rows: Sequence[Row], untrained: float) -> str:
    if ended is not None:
        level = EXPLODED if is_exploded(ended[0], untrained) else f"{ended[0]:.3f}"
        return level if math.isfinite(ended[0]) else "diverged"
    if not rows:
        return ""
    done = sum(row.step / row.num_steps for row in rows) / len(rows)
    return f"{done:.0%}" if any(row.running for row in rows) else "failed" if all(row.ended for row in rows) else "·"


def _collapse(rows: Sequence[Row], room: int) -> list[Row]:
    """Return the rows that fit: running ones, and the last ended ones in at most half of the room."""
    ended = [row for row in rows if row.ended][: min(LAST_ENDED, room // 2)]
    active = [row for row in rows if row.running or row.state in (STALLED, INTERRUPTED)][: room - len(ended)]
    return [*active, *ended]


def run_table(progress: Progress, rows: Sequence[Row], width: int | None = None) -> Table:
    """Return a table with a line per row, in the style of its state.

    Args:
        progress: the runs.
        rows: those of the table.
        width: columns of the terminal; a table too wide for it has narrower gaps, then lacks `DISPENSABLE` columns.
    """
    names = [f"{progress.words.counted}/s" if name == SPEED else name for name in COLUMNS]
    cells = [[visible(cell) for cell in _cells(progress, row)] for row in rows]
    sizes = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    gap, shown = GAP, [*range(len(COLUMNS))]
    for gap, num_left_out in ((GAP, 0), *((1, number) for number in range(len(DISPENSABLE) + 1))):
        shown = [place for place, name in enumerate(COLUMNS) if name not in DISPENSABLE[:num_left_out]]
        if width is None or sum(sizes[place] + gap for place in shown) - gap <= width:
            break
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    for place in shown:
        justify = "left" if COLUMNS[place] in ("mechanism", "state") else "right"
        table.add_column(names[place], justify=justify, no_wrap=True)
    for row, texts in zip(rows, cells, strict=True):
        style = STYLES[row.state if row.running else row.shown]
        table.add_row(*(Text(texts[place]) for place in shown), style=style)
    return table


def _cells(progress: Progress, row: Row) -> list[str]:
    """Return one run's cells by `COLUMNS`; "" for unavailable values."""
    eta = progress.row_eta_s(row) if row.running and row.stood_s is None else None
    stands = "" if row.stood_s is None else f"no step for {duration(row.stood_s)}"
    return [
        row.variant,
        f"{row.trial.spec['lr_peak']:g}",
        str(row.trial.spec["seed"]),
        f"{row.step}/{row.num_steps}",
        _number(row.loss, ".3f"),
        _number(row.val_nll, ".3f"),
        _number(row.tokens_per_s, ",.0f") if row.phase == "training" else "",
        duration(eta) if eta is not None else "",
        f"held by {row.held_by}"
        if row.held_by
        else " ".join(filter(None, (stands or row.phase or row.shown, row.owner and f"on {row.owner}"))),
    ]


def sort_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows in order: running, stalled, interrupted, ended (latest first), queued."""
    ended = sorted((row for row in rows if row.ended), key=lambda row: row.ended_at or 0.0, reverse=True)
    states = {
        state: [row for row in rows if row.state == state] for state in ("running", STALLED, INTERRUPTED, "queued")
    }
    return [*states["running"], *states[STALLED], *states[INTERRUPTED], *ended, *states["queued"]]


class Lines:
    """Log lines at each trial's start and end, and regular summaries between them.

    ``known``: whether to omit starts and ends from before the first call, for a reader who joins later.
    """

    def __init__(self, say: Callable[[str], None], *, known: bool = False):
        self._say, self._skips = say, known
        self._told: dict[str, str] = {}
        self._standing: set[str] = set()
        self._told_at, self._ended_then = time.monotonic(), 0

    def print_changes(self, progress: Progress) -> None:
        """Print starts and ends since the last call, and sometimes a summary."""
        for row in progress.rows:
            if not (row.running or row.ended):
                continue
            if row.trial.run_id not in self._told:
                self._told[row.trial.run_id] = "started"
                self._print_unless_skipped(f"start  {row.trial.label} ({row.trial.run_id})")
            if row.ended and self._told[row.trial.run_id] != "ended":
                self._told[row.trial.run_id] = "ended"
                self._print_unless_skipped(self._describe_end(row, len(progress.rows), progress.words.share))
            run_id = row.trial.run_id
            if row.stood_s is None:
                self._standing.discard(run_id)
            elif run_id not in self._standing:
                self._standing.add(run_id)
                self._say(f"stalled {row.trial.label} ({run_id}): no step for {duration(row.stood_s)}")
        if self._skips:
            self._skips, self._ended_then = False, self._num_ended
        self._print_summary(progress)

    def _print_unless_skipped(self, line: str) -> None:
        if not self._skips:
            self._say(line)

    @property
    def _num_ended(self) -> int:
        return sum(state == "ended" for state in self._told.values())

    def _describe_end(self, row: Row, num_runs: int, share: ShareWords | None) -> str:
        result = f" val NLL {row.val_nll:.3f}" if row.val_nll is not None else ""
        result += f" {share.name} {row.val_share:.1%}" if share and row.val_share is not None else ""
        seconds = f" in {row.seconds:.1f} s" if row.seconds is not None else ""
        return f"{row.shown:6} {row.trial.label} ({row.trial.run_id}){result}{seconds} [{self._num_ended}/{num_runs}]"

    def _print_summary(self, progress: Progress) -> None:
        step = max(FEWEST_BETWEEN, math.ceil(len(progress.rows) / PROGRESS_PARTS))
        if time.monotonic() - self._told_at < PROGRESS_S and self._num_ended - self._ended_then < step:
            return
        self._told_at, self._ended_then = time.monotonic(), self._num_ended
        at = ", ".join(_place(row) for row in progress.rows if row.running)
        self._say("; ".join(filter(None, (f"so far {counts_line(progress)}", left_text(progress), at))))


def _place(row: Row) -> str:
    after = f", {row.phase}" if row.phase in (CURVATURE, SAMPLES) else ""
    return f"{row.trial.label} at {row.step}/{row.num_steps}{after}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def count_runs(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"


class SweepConsole(Console):
    """The console of a sweep; training continues after the output's reader has gone."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class StatusConsole(Console):
    """The console of a display command; it ends with its output's reader."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # Rich would end the process with exit code 1


def print_line(console: Console, text: str) -> None:
    """Print a line verbatim with control characters `visible`: no markup, highlighting or wrapping."""
    console.print(visible(text, keep="\n"), markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Return seconds as text: ``"42 s"``, ``"4 min 12 s"``, ``"2 h 05 min"``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
