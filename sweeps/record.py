"""Record a sweep in ``study.json``: its runs, command, code and data."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability.config.sweep import SweepSpec
from stability.registry import Registry
from stability.runs.directory import RunDirectory, read_json
from stability.runs.provenance import provenance
from stability.runs.study import StudyFolder
from stability.runs.words import Words
from sweeps.earlier import Earlier, find_earlier, list_last_command, list_recorded
from sweeps.trial import Trial, choice_name

if TYPE_CHECKING:
    from stability.corpora.base import AbstractCorpus

from stability.runs.directory import readable_rows

OF_RUNS = ("variants", "stopped")  # a record's keys with values per run, by id
CLOCK = "%Y-%m-%d %H:%M:%S %z"


@dataclass(frozen=True)
class StudyRecord:
    """The record of one launch of a sweep.

    The methods' ``found`` is a search's own record (`sweeps.search.rounds.Search.record`), or None for a grid, with all
    runs fixed from the start.

    Attributes:
        study: the study's folder.
        spec: the sweep.
        before: the content of ``study.json`` when the launch began.
        origin: the record's values apart from the runs.
        started: start of the launch, seconds since 1970.
    """

    study: StudyFolder
    spec: SweepSpec
    before: Mapping[str, Any]
    origin: Mapping[str, Any]
    started: float

    @classmethod
    def begin(cls, spec: SweepSpec, corpus: AbstractCorpus) -> StudyRecord:
        """Return the record of a launch beginning now, without writing it."""
        study = StudyFolder.of(spec.runs_dir, spec.name)
        before = study.read() if study.file.exists() else {}
        return cls(study, spec, before, started=time.time(), origin=_origin(spec, corpus))

    def write(self, trials: Sequence[Trial], found: Mapping[str, Any] | None = None) -> None:
        """Record the runs requested so far, and retain those of earlier commands.

        The file is read again first, so that runs of a concurrent launch stay. ``replace=true`` takes those out of the
        report that were on record when this launch began.
        """
        record = self.study.read() if self.study.file.exists() else {}
        replaced = list_recorded(self.before) if self.spec.replace else ()
        kept = find_earlier(self.study, record, trials, replaced)
        run_ids = [trial.run_id for trial in trials] + _list_reported(kept)
        declared = self._declare(record, run_ids)
        values = {**self.origin, **declared, **_variants(self.spec, trials), **(found or {})}
        self.study.write(run_ids, **_add_earlier(values, self.study, record, kept))

    def _declare(self, record: Mapping[str, Any], run_ids: Sequence[str]) -> dict[str, Any]:
        """Return when the primary claim was declared, of how many runs, and how many had ended; {} without a claim.

        A claim on record stays declared as it was. Runs that join its study are added, with those that have ended.
        A record of an older version has a claim without its declaration, which stays unknown.
        """
        claim = _claim_of(self.origin)
        last = next((each for each in (record, self.before) if _claim_of(each) == claim), None)
        if claim is None or (last is not None and "declared" not in last):
            return {}
        known = set() if last is None else set(list_recorded(last))
        made = {"at": time.strftime(CLOCK), "ended": 0, "runs": 0} if last is None else last["declared"]
        joined = [RunDirectory(self.study.pool, run_id) for run_id in dict.fromkeys(run_ids) if run_id not in known]
        ended = made["ended"] + sum(run.finished for run in joined)
        return {"declared": {**made, "ended": ended, "runs": made["runs"] + len(joined)}}

    def close(self, trials: Sequence[Trial], found: Mapping[str, Any] | None, *, has_worked: bool) -> None:
        """Record the end of the launch and its total wall time.

        ``provenance.wall_s`` adds up the seconds of this and earlier launches of the same runs.

        Args:
            trials: all runs requested so far.
            found: the search's record, or None for a grid.
            has_worked: whether this launch worked on a run. If not, the earlier launch's values stay.
        """
        run_ids, begun = [trial.run_id for trial in trials], list_last_command(self.before) or [None]
        is_same = begun == (run_ids if found is None else run_ids[: len(begun)])
        earlier_s = self.before.get("provenance", {}).get("wall_s", 0.0) if is_same else 0.0
        if not has_worked and earlier_s:
            origin = {
                key: value
                for key, value in self.before.items()
                if key not in ("name", "run_ids", "earlier", "declared")
            }
        else:
            wall_s = earlier_s + time.time() - self.started
            origin = {**self.origin, "provenance": {**self.origin["provenance"], "wall_s": wall_s}}
        trained_by = {"trained_by": _list_trained_by(self.study.pool, run_ids)}
        replace(self, origin={**origin, **trained_by}).write(trials, found)


def _claim_of(record: Mapping[str, Any]) -> str | None:
    return record.get("spec", {}).get("primary")


def _list_trained_by(pool: Path, run_ids: Iterable[str]) -> list[dict[str, Any]]:
    """Return the commits and processors that trained the runs, those of most runs first.

    Each as in `stability.runs.records.TrainedBy`.
    """
    counts: Counter[tuple[Any, ...]] = Counter()
    for run_id in run_ids:
        file = RunDirectory(pool, run_id).provenance_file
        found: dict[str, Any] = {}
        with suppress(OSError, ValueError):  # missing or damaged: unknown
            found = read_json(file)
        counts[found.get("commit"), bool(found.get("dirty")), (found.get("hardware") or {}).get("cpu")] += 1
    return [
        {"commit": commit, "dirty": dirty, "cpu": cpu, "runs": number}
        for (commit, dirty, cpu), number in counts.most_common()
    ]


def _list_reported(kept: Sequence[Earlier]) -> list[str]:
    return [run_id for each in kept if each.is_reported for run_id in each.run_ids]


def _add_earlier(
    values: dict[str, Any], study: StudyFolder, record: Mapping[str, Any], kept: Sequence[Earlier]
) -> dict[str, Any]:
    """Return a record's values extended by the runs of earlier commands.

    Reported earlier runs retain their former values.
    """
    if not kept:
        return values
    reported = set(_list_reported(kept))
    found = {**values, "earlier": [each.to_json() for each in kept]}
    for key in OF_RUNS:
        of_earlier = {run_id: said for run_id, said in record.get(key, {}).items() if run_id in reported}
        if of_earlier:
            found[key] = {**of_earlier, **found.get(key, {})}
    if "lr_references" in found:
        names = {
            choice_name(read_json(RunDirectory(study.pool, run_id).spec_file)["optimizer"]) for run_id in reported
        } & set(Registry("optimizers").names())
        found["lr_references"] = {**_lr_references(names), **found["lr_references"]}
    if "lr_multiples" in found:
        found["lr_multiples"] = sorted({*record.get("lr_multiples", []), *found["lr_multiples"]})
    return found


def _origin(spec: SweepSpec, corpus: AbstractCorpus) -> dict[str, Any]:
    """Return command, launcher, spec, code, machine and data."""
    from stability.build import described

    origin = provenance()
    data = {"data_description": described(spec, corpus), "data_fingerprint": corpus.fingerprint}
    started_at = time.strftime(CLOCK)
    return {
        "launcher": spec.launcher,
        "command": origin["command"],
        "spec": spec.model_dump(mode="json"),
        **_references(spec),
        "words": asdict(words_of(spec)),
        "provenance": {**origin, "started_at": started_at, **data},
    }


def _references(spec: SweepSpec) -> dict[str, Any]:
    """Return the optimizers' reference rates, for a report's comparison of optimizers.

    ``lr_references`` maps an optimizer's name to its rate. With lr=scaled, ``lr_multiples`` lists the swept multiples.
    The result is {} for a single optimizer.
    """
    found = _lr_references(choice["optimizer"].name for _, choice in spec.curves())
    if len(found) == 1:
        return {}
    return {"lr_references": found} | ({"lr_multiples": list(spec.lr.rates())} if spec.lr.scaled else {})


def _lr_references(optimizers: Iterable[str]) -> dict[str, float]:
    return {name: Registry("optimizers").load(name).lr_reference for name in optimizers}


def words_of(spec: SweepSpec) -> Words:
    """Return the display words of a sweep's objective and data source."""
    objective, data = (
        Registry(family).load(part.name) for family, part in (("objectives", spec.objective), ("data", spec.data))
    )
    return replace(
        objective.words,
        summary=objective.summary(spec.objective.settings),
        tokens=data.tokens_of(spec.data.settings),
        direction=objective.direction,
    )


def _variants(spec: SweepSpec, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return each run's variant and each ablated setting's values; {} without ``ablate``."""
    if not spec.ablate:
        return {}
    ablations = [
        {
            "axis": axis,
            "part": item.part,
            "setting": item.setting,
            "values": [{"value": value, "variant": label} for value, label, _ in variants],
        }
        for item, axis, variants in spec.ablations()
    ]
    labels = {value["variant"] for item in ablations for value in item["values"] if value["variant"]}
    variants = {trial.run_id: trial.variant for trial in trials if trial.variant in labels}
    return {"variants": variants, "ablations": ablations}


def alpha_share(runs: Sequence[RunDirectory], started: float, ended: float, at_a_time: int) -> str:
    """Return a line on α_max's share of wall time, or "".

    It is "" if no α_max was measured between ``started`` and ``ended``. A run's share is its α_max time divided by
    training plus α_max, whenever they ran. The sweep's share is the α_max time between the two times, divided by their
    difference and ``at_a_time``.

    Args:
        runs: the runs.
        started: start of the launch, seconds since 1970.
        ended: end of the launch, seconds since 1970.
        at_a_time: number of concurrent runs.
    """
    spent = {run: readable_rows(run.curvature_timing_file, ("wall_s", "ended")) for run in runs}
    now = [row["wall_s"] for rows in spent.values() for row in rows if started <= row["ended"] <= ended]
    if not now:  # as of a finished sweep: no need to read thousands of logs
        return ""
    shares = []
    for run, rows in spent.items():
        training = [row["wall_s"] for row in readable_rows(run.timing_file, ("wall_s",))]
        alpha_s = sum(row["wall_s"] for row in rows)
        if rows and training and alpha_s + training[-1] > 0:
            shares.append(alpha_s / (alpha_s + training[-1]))
    if not shares:
        return ""
    low, high = (f"{100 * share:.0f}" for share in (min(shares), max(shares)))
    wall_s = ended - started
    of_sweep = 100 * sum(now) / (wall_s * at_a_time)
    span = low if low == high else f"{low} to {high}"
    return f"α_max took {of_sweep:.0f} % of {wall_s:.0f} s, {span} % of each run; hessian=false leaves it out"
