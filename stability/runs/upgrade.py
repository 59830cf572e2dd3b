"""Rewrite a pool's files of older versions, once; runs keep their ids.

Every file is replaced atomically and alone, so an interrupted upgrade is finished by the same command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from stability.config.base import AXES
from stability.config.identity import fill_newer_fields, is_same_run
from stability.config.parts import part
from stability.config.run import RunSpec
from stability.config.sweep import SweepSpec
from stability.registry import Registry
from stability.runs.cleaning import runs_of
from stability.runs.directory import RunDirectory, read_json, write_json
from stability.runs.lock import RunLock
from stability.runs.older import YOUNGER, OlderFile, read_words
from stability.runs.parquet import read_table, write_table
from stability.runs.records import Record, SpecFile, StudyFile
from stability.runs.study import StudyFolder
from stability.runs.words import Words


def upgrade(pool: Path) -> list[str]:
    """Write the older files of a pool anew; return a line on each one left as it is, then their number."""
    runs, studies = runs_of(pool), StudyFolder.list_studies(pool)
    lines: list[str] = []
    num_runs = sum(_is_upgraded(_upgrade_run, directory, lines) for directory in runs)
    num_studies = sum(_is_upgraded(_upgrade_study, study, lines) for study in studies)
    if not num_runs and not num_studies:
        return [*lines, f"nothing to upgrade in {pool}"]
    named = ("run" if num_runs == 1 else "runs", "study" if num_studies == 1 else "studies")
    return [*lines, f"upgraded {num_runs} {named[0]} and {num_studies} {named[1]} in {pool}"]


def _is_upgraded(upgrade_one: Callable[[Any], bool], one: Any, lines: list[str]) -> bool:
    """Return whether a run or a study was older, after its upgrade; a damaged or locked one gets a line."""
    try:
        return upgrade_one(one)
    except ValueError as error:
        lines.append(f"left {error}")
        return False


def _upgrade_run(directory: RunDirectory) -> bool:
    if not _is_older(directory.spec_file, SpecFile):
        return False
    lock = RunLock(directory.path)
    if not lock.acquire():
        raise ValueError(f"{directory.run_id}: {lock.owner() or 'another process'} works on it; repeat the command")
    try:
        values = read_json(directory.spec_file)
        newer = fill_newer_fields(values, RunSpec)
        assert is_same_run(values, newer, RunSpec), directory.run_id
        write_json(directory.spec_file, newer)
    finally:
        lock.release()
    return True


def _upgrade_study(study: StudyFolder) -> bool:
    is_older, tables = _is_older(study.file, StudyFile), _add_missing_columns(study)
    if not is_older and not tables:
        return False
    record = read_json(study.file)
    for run_id in record["run_ids"]:
        if owner := RunLock(study.pool / run_id).owner():
            raise ValueError(f"study {study.path.name}: {owner} works on {run_id}; repeat the command")
    for path, table in tables.items():
        write_table(table, path)
    if is_older:
        write_json(study.file, _upgrade_record(record))
    return True


def _is_older(path: Path, record: type[Record]) -> bool:
    """Return whether a file is of an older version; ValueError if it is damaged."""
    try:
        read_json(path, record)
    except OlderFile:
        return True
    return False


def _add_missing_columns(study: StudyFolder) -> dict[Path, pa.Table]:
    """Return the study's results that lack columns, with these columns empty."""
    found = {}
    for path, columns in ((study.results / f"{name}.parquet", columns) for name, columns in YOUNGER.items()):
        if not path.is_file():
            continue
        table = read_table(path)
        if absent := [each for each in columns if each not in table.column_names]:
            for each in absent:
                table = table.append_column(each, pa.nulls(len(table)))
            found[path] = table
    return found


def _upgrade_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a study's record with all words, whole parts, and the rungs of runs left early."""
    spec = fill_newer_fields(record["spec"], SweepSpec)
    spec |= {
        key: [{"name": each} if isinstance(each, str) else each for each in spec[key]] for key in AXES if key in spec
    }
    found = {**record, "spec": spec, "words": asdict(_words(record, spec))}
    if (halving := spec.pop("halving", None)) is not None:
        spec["search"] = {"name": "asha", **halving, "synchronous": True}
        found["rungs"] = _older_rungs(spec)
    return found


def _words(record: Mapping[str, Any], spec: Mapping[str, Any]) -> Words:
    """Return a record's words; missing ones are the objective's and the data source's own."""
    words = Words()
    for family, key in (("objectives", "objective"), ("data", "data")):
        name = (spec.get(key) or {}).get("name", "")
        if name not in Registry(family).names():
            continue  # of a plugin that is not here
        own, settings = Registry(family).load(name), part(family, spec[key]).settings
        if key == "objective":
            words = replace(own.words, summary=own.summary(settings), direction=own.direction)
        else:
            words = replace(words, tokens=own.tokens_of(settings))
    return replace(words, **read_words(record))


def _older_rungs(spec: Mapping[str, Any]) -> list[int]:
    """Return the rungs of a study before `AshaSpec.rungs`: each was moved to a validation by itself."""
    search, steps, every = spec["search"], spec["steps"], spec["evaluation"]["every_steps"]
    step, found = search.get("first_step") or -(-steps // search["reduction"] ** 2), []
    while (rung := -(-step // every) * every) < steps:
        found += [rung] if rung not in found else []
        step *= search["reduction"]
    return found
