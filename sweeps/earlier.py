"""List a study's runs from earlier commands, to preserve them in its record."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stability.config.base import AXES
from stability.config.identity import drop_excluded
from stability.config.run import RunSpec
from stability.runs.directory import RunDirectory, read_json
from stability.runs.records import SpecFile
from stability.runs.study import StudyFolder
from sweeps.trial import Trial

PARTS = (*AXES, "cross")  # the parts that separate a report's series
APART = (*PARTS, "lr_peak", "seed", "plugins")  # runs of one study may differ in these
MOST_NAMED = 2  # runs named in a line
FINGERPRINT = 12  # characters of a fingerprint in a line, equal to a plan's line on the data
LONGEST_VALUE = 40  # characters of a value in a line
OTHER = "name=OTHER makes a study of its own"
UNREADABLE = "spec.json, missing, damaged or of a part that is not here"


@dataclass(frozen=True)
class Earlier:
    """Runs of one earlier command.

    Attributes:
        command: the command line.
        run_ids: the runs' ids.
        is_reported: whether the report includes them. If not, they are on record only, to prevent their removal.
    """

    command: str
    run_ids: tuple[str, ...]
    is_reported: bool

    def to_json(self) -> dict[str, Any]:
        return {"command": self.command, "run_ids": list(self.run_ids), "reported": self.is_reported}


def find_earlier(
    study: StudyFolder, record: Mapping[str, Any], trials: Sequence[Trial], replaced: Collection[str] = ()
) -> tuple[Earlier, ...]:
    """Return the earlier runs remaining on a study's record, grouped by command.

    The report includes a run if it differs from the trials only in the axes of a study (`APART`). Any other run would
    look like another seed of theirs. A run with an unreadable spec stays in or outside of the report, as before. A run
    missing from the pool is dropped from the record (`describe_changes` reports it).

    Args:
        study: the study, for its pool.
        record: the content of its ``study.json`` before the command.
        trials: the runs of the command.
        replaced: ids of runs that leave the report in any case (``replace=true``).
    """
    asked = {trial.run_id for trial in trials}
    before = [
        *((each["command"], each["run_ids"], each["reported"]) for each in record.get("earlier", [])),
        (str(record.get("command", "")), list_last_command(record), True),
    ]
    found: dict[tuple[str, bool], list[str]] = {}
    for command, run_ids, was_reported in before:
        for run_id in run_ids:
            if run_id not in asked and _exists(study, run_id):
                difference = find_difference(RunDirectory(study.pool, run_id), trials)
                is_reported = was_reported and run_id not in replaced and difference in ("", UNREADABLE)
                found.setdefault((command, is_reported), []).append(run_id)
    return tuple(Earlier(command, tuple(run_ids), reported) for (command, reported), run_ids in found.items())


def list_last_command(record: Mapping[str, Any]) -> list[str]:
    """Return the ids of the last command's runs."""
    others = {run_id for each in record.get("earlier", []) for run_id in each["run_ids"]}
    return [run_id for run_id in record.get("run_ids", []) if run_id not in others]


def list_recorded(record: Mapping[str, Any]) -> list[str]:
    """Return the ids of all runs on a record, of earlier commands too, each once."""
    of_earlier = (run_id for each in record.get("earlier", []) for run_id in each["run_ids"])
    return list(dict.fromkeys([*record.get("run_ids", []), *of_earlier]))


def find_difference(directory: RunDirectory, trials: Sequence[Trial]) -> str:
    """Return a setting that differs from all trials', with both values.

    The axes of a study do not count. The result is "" if nothing else differs, and `UNREADABLE` if the spec cannot be
    read.
    """
    try:
        whole = read_json(directory.spec_file, SpecFile)
        spec = drop_excluded(whole, RunSpec)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return UNREADABLE
    asked = [json.loads(json.dumps(trial.spec)) for trial in _kinds(trials)]
    others = [drop_excluded(each, RunSpec) for each in asked]
    if not any(_recipe(spec) == _recipe(other) for other in others):
        return _first_difference(_recipe(spec), _recipe(others[0]), whole, asked[0])
    for axis in PARTS:
        same = [
            (other[axis], each[axis])
            for other, each in zip(others, asked, strict=True)
            if axis in other and _name(other[axis]) == _name(spec.get(axis))
        ]
        if same and spec[axis] not in [part for part, _ in same]:
            part, whole_part = same[0]
            why = _first_difference(*map(_settings, (spec[axis], part, whole[axis], whole_part)))
            return ".".join(filter(None, [axis, _name(spec[axis]), why]))
    return ""


def _settings(part: Any) -> Mapping[str, Any]:
    return part if isinstance(part, dict) else {"name": part}  # a part without settings is reduced to its name


def _first_difference(
    one: Mapping[str, Any], other: Mapping[str, Any], whole: Mapping[str, Any], whole_other: Mapping[str, Any]
) -> str:
    """Return the first setting that differs, as ``"steps: 30, now 40"``; "" for none.

    Args:
        one: the earlier spec, restricted to the fields of the run's id.
        other: the present one, likewise.
        whole: the earlier spec with all values, including neutral values of newer settings.
        whole_other: the present one, likewise.
    """
    before, now = _flatten(one), _flatten(other)
    name = next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)
    return "" if name is None else f"{name}: {_value(name, _flatten(whole))}, now {_value(name, _flatten(whole_other))}"


def _value(name: str, values: Mapping[str, Any]) -> str:
    """Return a setting's value in command-line form; fingerprints and long values are cut."""
    if name not in values:
        return "not set"
    value = values[name]
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    longest = FINGERPRINT if name.endswith("fingerprint") else LONGEST_VALUE
    return text if len(text) <= longest else f"{text[:longest]}{'' if longest == FINGERPRINT else '…'}"


def _exists(study: StudyFolder, run_id: str) -> bool:
    return RunDirectory(study.pool, run_id).path.is_dir()


def _kinds(trials: Sequence[Trial]) -> list[Trial]:
    """Return one trial per recipe; learning rate and seed do not count."""
    kinds = {
        json.dumps({**trial.spec, "lr_peak": 0, "seed": 0}, sort_keys=True, default=str): trial for trial in trials
    }
    return list(kinds.values())


def _recipe(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in spec.items() if key not in APART}


def _name(part: Any) -> str:
    return str(part["name"] if isinstance(part, dict) else part)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def describe_refusal(study: StudyFolder, record: Mapping[str, Any], trials: Sequence[Trial]) -> str:
    """Describe the runs that would leave the study's report, and both ways on; "" for none.

    Args:
        study: the study, for its name and pool.
        record: the content of its ``study.json`` before the command.
        trials: the runs of the command.
    """
    run_ids = _find_new(study, record, trials, is_reported=False)
    if not run_ids:
        return ""
    has = "1 run has" if len(run_ids) == 1 else f"{len(run_ids)} runs have"
    return (
        f"name={study.path.name}: {has} other settings there ({_describe_with_reason(study, run_ids, trials)}) "
        f"and would leave its report; {OTHER}, replace=true reports this command's runs alone (the others stay on "
        "record)"
    )


def _find_new(
    study: StudyFolder,
    record: Mapping[str, Any],
    trials: Sequence[Trial],
    *,
    is_reported: bool,
    replaced: Collection[str] = (),
) -> list[str]:
    """Return the ids of runs that this command makes earlier ones, inside or outside of the report."""
    known = {(run_id, bool(each["reported"])) for each in record.get("earlier", []) for run_id in each["run_ids"]}
    return [
        run_id
        for each in find_earlier(study, record, trials, replaced)
        if each.is_reported is is_reported
        for run_id in each.run_ids
        if (run_id, is_reported) not in known
    ]


def _describe_with_reason(study: StudyFolder, run_ids: Sequence[str], trials: Sequence[Trial]) -> str:
    directories = [RunDirectory(study.pool, run_id) for run_id in run_ids]
    return f"{_describe(directories)}: another {find_difference(directories[0], trials) or 'setting'}"


def describe_changes(
    study: StudyFolder, record: Mapping[str, Any], trials: Sequence[Trial], *, replace: bool = False
) -> Iterator[str]:
    """Yield a line each for newly kept, newly unreported and missing earlier runs.

    Runs already recorded as earlier ones get no line unless they are missing; a line on kept runs counts them, too.

    Args:
        study: the study, for its name and pool.
        record: the content of its ``study.json`` before the command.
        trials: the runs of the command.
        replace: whether all earlier runs leave the report; a line says so if there are none.
    """
    replaced = list_recorded(record) if replace else ()
    for is_reported in (True, False):
        run_ids = _find_new(study, record, trials, is_reported=is_reported, replaced=replaced)
        if not run_ids:
            if replace and not is_reported:
                yield f"replace=true: nothing is replaced, {study.path.name} has no other runs in its report"
            continue
        if replace:
            which = _describe([RunDirectory(study.pool, run_id) for run_id in run_ids])
            stay = "it stays" if len(run_ids) == 1 else "they stay"
            runs = _count_earlier(len(run_ids))
            yield f"{study.path.name}: replace=true takes {runs} ({which}) out of its report; on record {stay}"
            continue
        kept = [each for each in find_earlier(study, record, trials) if each.is_reported is is_reported]
        number = len({run_id for each in kept for run_id in each.run_ids})
        what = f"{study.path.name}: keeps {_count_earlier(number)}"
        more = f"{len(run_ids)} more than before: " if number > len(run_ids) else ""
        if is_reported:
            which = _describe([RunDirectory(study.pool, run_id) for run_id in run_ids])
            yield f"{what} that this command does not ask for ({more}{which}), in its report, too; {OTHER}"
        else:
            which = _describe_with_reason(study, run_ids, trials)
            yield f"{what} of other settings ({more}{which}) on record, outside of its report; {OTHER}"
    asked = {trial.run_id for trial in trials}
    if gone := [each for each in list_recorded(record) if each not in asked and not _exists(study, each)]:
        named = ", ".join(gone[:MOST_NAMED]) + (", …" if len(gone) > MOST_NAMED else "")
        are, go = ("run is", "goes") if len(gone) == 1 else ("runs are", "go")
        yield f"{study.path.name}: {len(gone)} earlier {are} no longer in the pool and {go} from the record ({named})"


def _count_earlier(number: int) -> str:
    return f"{number} earlier run{'s' if number > 1 else ''}"


def _describe(directories: Sequence[RunDirectory]) -> str:
    named = ", ".join(_label(directory) for directory in directories[:MOST_NAMED])
    return named + (", …" if len(directories) > MOST_NAMED else "")


def _label(directory: RunDirectory) -> str:
    try:
        spec = read_json(directory.spec_file)
        return f"{_name(spec['mechanism'])} lr={spec['lr_peak']:g} seed={spec['seed']}"
    except (OSError, ValueError, KeyError, TypeError):
        return directory.run_id
