"""Follow a sweep's trials by reading their files, equally for every launcher.

Polling is cheap for hundreds of runs.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from stability.runs.directory import FINISHED, INTERRUPTED, RUNNING, STOPPED, RunDirectory, mtime_ns, read_tail
from stability.runs.lock import RunLock
from stability.runs.words import Words, is_exploded, shown_state
from sweeps.trial import Trial, variants

CURVATURE, SAMPLES = "curvature", "samples"  # phases after the training
OF_TEXT = Words()
LATEST = 4  # timed trials of a kind that the time left is estimated from
# A run's first steps compile and fill caches: one slow step would be multiplied by all of α_max's. Then the fewest that
# are timed before anything is extrapolated.
WARM_UP_STEPS, FEWEST_STEPS = 3, 5
RECENT_S = 600.0  # training from which a step is timed: the end of a log alone may hold the last seconds only
STALLED = "stalled"  # status "running" without a process working on the run


@dataclass
class Row:
    """One trial's state at the last poll; times are in seconds since the epoch.

    Attributes:
        state: "running" lasts until α_max is measured and samples are scored.
        owner: "host:pid" of the process working on the run, for a view from outside.
        stood_s: seconds without a step, if unusually long.
        step_s: seconds per step of the last `RECENT_S`, without a run's first steps; None before enough steps
            (`FEWEST_STEPS`).
        halves_s: seconds per step in each half of these steps; () before enough steps (`STEPS`).
        marks: the last timed step of each poll, of the last `RECENT_S`.
        held_by: "host:pid" of another sweep's process working on the run, for a launch that waits.
        trained: whether an earlier launch trained the run, so that this one only measures or samples it.
        expected: (seconds per step, seconds after training) measured before the launch (`sweeps.costs.expected_times`).
        verdict: outcome of the training; "" before its end.
        result: the training's result, from its status; {} before its end.
        signature: modification times at the last poll (`_signature`).
    """

    trial: Trial
    variant: str
    state: str = "queued"
    phase: str = ""
    step: int = 0
    num_steps: int = 0
    loss: float | None = None
    val_nll: float | None = None
    val_share: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    curvature_s: float | None = None
    started_at: float | None = None
    trained_at: float | None = None
    ended_at: float | None = None
    reason: str = ""
    owner: str = ""
    stood_s: float | None = None
    halves_s: tuple[float, ...] = ()
    marks: list[dict[str, Any]] = field(default_factory=list, repr=False)
    held_by: str = ""
    trained: bool = False
    expected: tuple[float, float] | None = None
    verdict: str = ""
    result: dict[str, Any] = field(default_factory=dict, repr=False)
    signature: tuple[int, int] | None = field(default=None, repr=False)

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def shown(self) -> str:
        """The verdict, or the state before one, for readers (`shown_state`)."""
        return shown_state(self.verdict or self.state, self.val_nll, self.init_nll)

    @property
    def init_nll(self) -> float | None:
        """NLL at initialisation; None before the end of the training."""
        return self.result.get("init_nll")

    @property
    def ended(self) -> bool:
        return self.state in (*FINISHED, STOPPED, "failed")

    @property
    def seconds(self) -> float | None:
        return self.ended_at - self.started_at if self.ended_at and self.started_at else None


class Progress:
    """The trials of one launch, or of a study viewed from outside.

    A launch ignores statuses written before it. From outside, every status counts, and the run's lock decides between
    running and stalled.

    Args:
        trials: the trials.
        is_done: whether a trained trial has all measurements.
        from_outside: whether another process, or none, works on the study.
        earlier: ended runs of the same sweep; they count for `best` and `medians` only.
        words: the objective's words.
        expected: expected times by run id; {} if nothing was measured before the launch.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        is_done: Callable[[Trial], bool] = lambda trial: True,
        *,
        from_outside: bool = False,
        earlier: Sequence[Trial] = (),
        words: Words = OF_TEXT,
        expected: Mapping[str, tuple[float, float]] | None = None,
    ):
        self._is_done, self._from_outside, self.words = is_done, from_outside, words
        named = list(zip([*trials, *earlier], variants([*trials, *earlier]), strict=True))
        self.rows = [Row(trial, variant, num_steps=trial.spec["steps"]) for trial, variant in named[: len(trials)]]
        self._earlier = [_ended_row(trial, variant) for trial, variant in named[len(trials) :]]
        self._status_files = [str(row.trial.directory.status_file) for row in self.rows] if from_outside else []
        for row in self.rows:
            row.signature = None if from_outside else _signature(row.trial)
            row.expected = (expected or {}).get(row.trial.run_id)
            row.trained = not from_outside and row.trial.measures and _has_verdict(row.trial)
        self.most_at_once = 0
        self._began_at = time.time()
        self._speeds = _speeds(self.rows)

    def poll(self) -> None:
        """Refresh the rows of unfinished trials; from outside, also of finished ones whose status has changed.

        It calls `stat` once per trial and reads the log ends of running trials only.
        """
        for row, file in zip(self.rows, self._status_files, strict=False):  # none for a launch
            if row.state not in FINISHED or row.signature is None or mtime_ns(file) != row.signature[0]:
                self._refresh_row_from_outside(row)
        for row in () if self._from_outside else self.rows:
            if not row.ended:
                self._refresh_row(row)
        self.most_at_once = max(self.most_at_once, sum(row.running and not row.held_by for row in self.rows))
        self._speeds = _speeds(self.rows)

    def _refresh_row(self, row: Row) -> None:
        """Refresh a row of this launch; its files are read only if they changed."""
        row.held_by = str(row.trial.find_other_owner() or "")
        signature = _signature(row.trial)
        if row.trained and row.started_at is None and not row.held_by and row.trial.lock.owner():
            # the status dates from the end of training: only the lock shows a measurement in progress
            row.state, row.started_at = "running", time.time()
        if signature == row.signature and not row.running:
            return
        row.signature = signature
        try:
            status = row.trial.directory.status()
        except ValueError:  # statuses are replaced atomically; on a failing disk the last readable one counts
            return
        if status["state"] == "queued":
            return
        self._read_status(row, status)
        if row.running and row.phase == "training" or row.state == STOPPED:  # a stopped run has a log but no result
            _read_logs(row)

    def _refresh_row_from_outside(self, row: Row) -> None:
        """Refresh a row of another process's launch, from its status and its lock."""
        row.signature = _signature(row.trial)
        # read the lock before the status: a run writes its last status before it releases the lock
        row.owner = str(RunLock(row.trial.directory.path).owner() or "")
        try:
            status = row.trial.directory.status()
        except ValueError as error:
            row.state, row.phase, row.reason = "failed", "", str(error)
            return
        self._read_status(row, status)
        if row.running and not row.owner:
            row.state, row.phase = (STALLED if status["state"] == "running" else status["state"]), ""
        elif row.owner and row.state in ("queued", STOPPED, INTERRUPTED, "failed"):
            row.state, row.phase = "running", "starting"
        if row.phase == "training" or row.state == STALLED:
            _read_logs(row)

    def _read_status(self, row: Row, status: dict[str, Any]) -> None:
        """Set a row's step, state, result and times from its status."""
        row.step, row.num_steps = status["step"], status.get("num_steps", row.num_steps)
        row.state, row.phase = status["state"], status.get("phase", "training") if status["state"] == "running" else ""
        row.reason, row.stood_s = status.get("reason", ""), None
        row.started_at, row.verdict = row.started_at or self._start_of(status), ""
        if row.state in FINISHED:
            result = status.get("result", {})
            row.val_nll, row.trained_at = result.get("val_nll"), status["changed_at"]
            row.verdict, row.result = row.state, result
            row.val_share = None if self.words.share is None else result.get(self.words.share.column)
            if row.step_s is None and row.step and result.get("wall_s"):
                row.step_s = result["wall_s"] / row.step
            if row.trial.measures and not self._is_done(row.trial):
                row.state, row.phase = "running", _find_phase(row.trial)
        if row.ended:
            self._record_end_time(row, status["changed_at"])

    def _start_of(self, status: dict[str, Any]) -> float | None:
        """Return the trial's start in this launch; None if an earlier one trained it."""
        if status["state"] == "running":
            return status["changed_at"]
        seconds = status.get("result", {}).get("wall_s")
        return status["changed_at"] - seconds if seconds and status["changed_at"] > self._began_at else None

    def _record_end_time(self, row: Row, changed_at: float) -> None:
        row.ended_at = changed_at
        if row.trial.measures and row.trained_at:
            row.ended_at = max(changed_at, (row.signature or (0, 0))[1] / 1e9)
            began_at = (
                row.started_at if row.trained else row.trained_at if row.started_at or self._from_outside else None
            )
            row.curvature_s = None if began_at is None else max(0.0, row.ended_at - began_at)

    def counts(self) -> Counter[str]:
        return Counter("done" if row.state in FINISHED else row.state for row in self.rows)

    def verdicts(self) -> Counter[str]:
        """Count the ended runs by their states for readers."""
        return Counter(row.shown for row in self.rows if row.ended)

    def best(self) -> dict[str, tuple[float, float, int]]:
        """Return per variant its best (validation NLL, learning rate, number of seeds).

        The score of a learning rate is its median (`medians`). A variant that diverged or exploded at each has none.
        """
        points = {
            variant: min((nll, lr, count) for lr, (nll, count) in rates.items())
            for variant, rates in self.medians().items()
        }
        return {
            variant: best
            for variant, best in points.items()
            if math.isfinite(best[0]) and not is_exploded(best[0], self.untrained_nll(variant))
        }

    def untrained_nll(self, variant: str) -> float:
        """Return the NLL of a variant's untrained model, the highest of its runs; NaN if not recorded."""
        rows = (row for row in (*self.rows, *self._earlier) if row.variant == variant)
        return max((row.init_nll for row in rows if row.init_nll is not None), default=math.nan)

    def medians(self) -> dict[str, dict[float, tuple[float, int]]]:
        """Return per variant and learning rate (median validation NLL, number of ended seeds).

        A diverged seed counts as inf.
        """
        found: dict[str, dict[float, list[float]]] = {}
        for row in (*self.rows, *self._earlier):
            if row.state in FINISHED:
                nll = math.inf if row.val_nll is None else row.val_nll
                found.setdefault(row.variant, {}).setdefault(row.trial.spec["lr_peak"], []).append(nll)
        return {
            variant: {lr: (median(nlls), len(nlls)) for lr, nlls in rates.items()} for variant, rates in found.items()
        }

    def share_done(self) -> float:
        """Return the share of the work that is done: by time if every kind is timed, else by steps."""
        is_timed = all(self._speeds[row.variant][0] is not None for row in self.rows)
        done = whole = 0.0
        for row in self.rows:
            step_s, after_s = self._speeds[row.variant] if is_timed else (1.0, 0.0)
            seconds = after_s if row.trained and is_timed else row.num_steps * (step_s or 0.0) + after_s
            left = 0.0 if row.ended else self.row_eta_s(row) if is_timed else float(row.num_steps - row.step)
            whole += seconds
            done += seconds - min(seconds, seconds if left is None else left)
        return done / whole if whole else 0.0

    def row_eta_s(self, row: Row, factor: float = 1.0) -> float | None:
        """Return the seconds until a trial ends, or None before enough steps of any trial were timed.

        For a trial trained earlier, only the measurements after training count. ``factor`` multiplies the training.
        """
        step_s, curvature_s = self._speeds[row.variant]
        step_s = row.step_s or step_s
        # an expected time alone is that of a step or two before the launch
        if not (self.is_timed_whole if row.trained else any(each.step_s for each in self.rows)):
            return None
        if row.trained or row.phase in (CURVATURE, SAMPLES):
            began_at = row.started_at if row.trained else row.trained_at
            return max(0.0, curvature_s - (time.time() - (began_at or time.time())))
        return None if step_s is None else factor * (row.num_steps - row.step) * step_s + curvature_s

    @property
    def is_timed_whole(self) -> bool:
        """Whether the time after training is known; until then, `eta_s` omits it."""
        return any(row.curvature_s is not None for row in self.rows) or not any(
            row.trial.measures and row.expected is None for row in self.rows if not row.ended
        )

    def eta_s(self, factor: float = 1.0) -> float | None:
        """Return the seconds until the last trial ends, or None before anything was timed.

        It assumes the speeds measured so far, those of untimed kinds in the expected ratio to the timed ones, and the
        largest number of concurrent runs so far. ``factor`` multiplies the training, not what follows it.
        """
        etas = [self.row_eta_s(row, factor) for row in self.rows if not row.ended]
        known = [eta for eta in etas if eta is not None]
        if len(known) < len(etas) or not self.most_at_once:
            return None
        return max(sum(known) / self.most_at_once, max(known, default=0.0))

    def swing(self) -> tuple[float, float]:
        """Return the fastest and the slowest of the last measured steps over those that `eta_s` assumes.

        Of each variant with steps left: the last timed trials and both halves of a running one's last steps. (1, 1)
        with one number.
        """
        found = [1.0]
        open_rows = [row for row in self.rows if not (row.ended or row.trained or row.phase in (CURVATURE, SAMPLES))]
        for variant in {row.variant for row in open_rows}:
            step_s, last = self._speeds[variant][0], _last_timed(row for row in self.rows if row.variant == variant)
            if step_s:
                found += [each / step_s for row in last for each in (row.step_s, *row.halves_s) if each]
        return min(found), max(found)


def _last_timed(rows: Iterable[Row]) -> list[Row]:
    """Return the running timed trials and those that ended last, `LATEST` at most unless more are running."""
    timed = [row for row in rows if row.step_s is not None]
    running = [row for row in timed if not row.ended]
    ended = sorted((row for row in timed if row.ended), key=lambda row: row.ended_at or 0.0, reverse=True)
    return [*running, *ended[: max(0, LATEST - len(running))]]


def _has_verdict(trial: Trial) -> bool:
    try:
        return trial.directory.finished
    except ValueError:  # a damaged status: the trial itself reports it
        return False


def _ended_row(trial: Trial, variant: str) -> Row:
    status = trial.directory.status()
    return Row(trial, variant, state=status["state"], val_nll=status.get("result", {}).get("val_nll"))


def _speeds(rows: Sequence[Row]) -> dict[str, tuple[float | None, float]]:
    """Return per variant (seconds per step, seconds for α_max and samples).

    Each is the median over the variant's timed trials, a step's over the last ones (`_last_timed`): what else the
    machine does changes. Without one it is the expected time, scaled as the timed
    trials' differ from theirs, and without an expected time the median over all timed trials.
    """
    groups: dict[str, list[Row]] = {}  # medians: a measurement resumed on another day appears to take that long
    for row in rows:
        groups.setdefault(row.variant, []).append(row)
    step_s, after_s = _median(row.step_s for row in rows), _median(row.curvature_s for row in rows)
    step_scale = _median(row.step_s / row.expected[0] for row in rows if row.step_s and row.expected)
    after_scale = _median(
        row.curvature_s / row.expected[1] for row in rows if row.curvature_s and row.expected and row.expected[1]
    )
    found = {}
    for variant, group in groups.items():
        expected = group[0].expected
        scaled = (
            (expected[0] * (step_scale or 1.0), expected[1] * (after_scale or step_scale or 1.0)) if expected else None
        )
        found[variant] = (
            _median(row.step_s for row in _last_timed(group)) or (scaled[0] if scaled else step_s),
            _median(row.curvature_s for row in group) or (scaled[1] if scaled else after_s or 0.0),
        )
    return found


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _find_phase(trial: Trial) -> str:
    """Return a trained trial's phase: α_max until its table exists, then samples."""
    return (
        CURVATURE
        if trial.curvature is not None and not any(trial.directory.curvature_file("").parent.glob("*.parquet"))
        else SAMPLES
    )


def _signature(trial: Trial) -> tuple[int, int]:
    """Return modification times that change with the status, curvature tables, samples or scores."""
    directory = trial.directory
    folders = (directory.curvature_file("").parent, directory.generation_file("").parent, directory.path / "samples")
    return mtime_ns(directory.status_file), max(map(mtime_ns, folders))


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


def _read_logs(row: Row) -> None:
    """Set a row's step, loss, validation and speed from the ends of its logs."""
    directory = row.trial.directory
    metrics = read_tail(directory.metrics_file)
    timing = read_tail(directory.timing_file, numbers=("step", "wall_s", "tokens_per_s"))
    if metrics:
        row.step = max(row.step, metrics[-1]["step"])
        row.loss = _number(metrics[-1].get("loss"))
        validated = [nll for line in metrics if (nll := _number(line.get("val_nll"))) is not None]
        row.val_nll = validated[-1] if validated else row.val_nll
    if timing:
        row.tokens_per_s = fmean(line["tokens_per_s"] for line in timing)
        tail = [line for line in timing if line["step"] >= WARM_UP_STEPS]
        row.marks = [*_recent_marks(row.marks, tail), *tail[-1:]]
        timed = [*(mark for mark in row.marks if mark["step"] < tail[0]["step"]), *tail]
        row.step_s = (_mean_step(timed) if len(tail) > FEWEST_STEPS else None) or row.step_s
        row.halves_s = tuple(filter(None, map(_mean_step, _halve(timed))))
    row.stood_s = standing_s(directory, timing) if row.phase == "training" else None


def _recent_marks(marks: Sequence[dict[str, Any]], tail: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the marks before a log's last row, of the last `RECENT_S`; a resumed run's repeated steps have none."""
    if not tail:
        return []
    last = tail[-1]
    since = last["wall_s"] - RECENT_S
    return [each for each in marks if each["step"] < last["step"] and since <= each["wall_s"] < last["wall_s"]]


def _halve(timed: Sequence[dict[str, Any]]) -> tuple[Sequence[dict[str, Any]], ...]:
    """Return the rows up to the middle step and from there; () with fewer than `STEPS` steps in a half."""
    if not timed or timed[-1]["step"] - timed[0]["step"] < 2 * STEPS - 1:
        return ()
    half = (timed[0]["step"] + timed[-1]["step"] + 1) // 2
    middle = next(index for index, row in enumerate(timed) if row["step"] >= half)
    return timed[: middle + 1], timed[middle:]


def _mean_step(timing: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean seconds a step between the first and the last row; None without two steps."""
    steps = timing[-1]["step"] - timing[0]["step"] if timing else 0
    return (timing[-1]["wall_s"] - timing[0]["wall_s"]) / steps if steps > 0 else None


LEAST_S = 60.0
STEPS = 20  # a validation takes as long as a few steps
FIRST_S = 300.0  # limit before two steps are timed: imports, compilation, data preparation


def idle_s(directory: RunDirectory) -> float:
    """Return the seconds since a run last logged a step or changed its status.

    File modification times give the last change.
    """
    last = 0.0
    for file in (directory.metrics_file, directory.status_file):
        try:
            last = max(last, file.stat().st_mtime)
        except FileNotFoundError:
            continue
    return time.time() - last


def standing_s(directory: RunDirectory, timing: Sequence[dict[str, Any]]) -> float | None:
    """Return a training run's seconds without a step, or None if not unusually long.

    Args:
        directory: the run's directory.
        timing: the last rows of its ``timing.jsonl``. The limit is 20 times their median step, at least 60 s; 300 s
            without timed steps.
    """
    # without gaps between a run and its resumption
    pairs = [(row["wall_s"] - before["wall_s"], row["step"] - before["step"]) for before, row in pairwise(timing)]
    seconds, steps = idle_s(directory), [seconds / steps for seconds, steps in pairs if seconds > 0 and steps > 0]
    return seconds if seconds > (max(LEAST_S, STEPS * median(steps)) if steps else FIRST_S) else None


def hangs(directory: RunDirectory, limit_s: float) -> bool:
    """Return whether a run in training had no step for more than ``limit_s`` seconds."""
    if idle_s(directory) <= limit_s:
        return False
    status = directory.status()
    return status["state"] == RUNNING and status.get("phase", "training") == "training"
