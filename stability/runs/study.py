"""A study: the list of its runs in ``runs/studies/<name>/study.json``. No torch.

Several studies may list the same run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stability.registry import near_misses
from stability.runs.directory import RunDirectory, make_damage_error, read_json, write_json
from stability.runs.leftovers import remove_abandoned
from stability.runs.records import StudyFile

RUN_ID = r"[0-9a-f]{12}"
REMEDY = "move it away and repeat the study's commands, which list its runs again and train none of them anew"


class StudyFolder:
    """A study's folder ``<runs_dir>/studies/<name>``; the pool of runs is two levels up."""

    def __init__(self, path: str | Path):
        self.path = Path(path).resolve()
        self.pool = self.path.parent.parent
        self.file = self.path / "study.json"
        self.results = self.path / "results"

    @classmethod
    def of(cls, runs_dir: str | Path, name: str) -> StudyFolder:
        return cls(Path(runs_dir) / "studies" / name)

    @classmethod
    def find(cls, runs_dir: str | Path, name: str) -> StudyFolder:
        """Return the study in the folder ``name``, or of that name in the pool.

        Raises:
            ValueError: it does not exist; the message has the nearest name.
        """
        if (Path(name) / "study.json").exists():
            return cls(name)
        study = cls.of(runs_dir, name)
        if not study.file.exists():
            there = tuple(each.path.name for each in cls.list_studies(runs_dir))
            raise ValueError(
                f"no study '{name}' in {study.path.parent}; "
                + (near_misses(name, there, "studies there") if there else "run python -m stability.sweep first")
            )
        return study

    @classmethod
    def find_all(cls, runs_dir: str | Path, names: Sequence[str]) -> list[StudyFolder]:
        """Return the studies as `find` does.

        Raises:
            ValueError: one does not exist, or two have one name: tables and files would not tell them apart.
        """
        studies = [cls.find(runs_dir, name) for name in names]
        called = [study.path.name for study in studies]
        if twice := next((name for name in called if called.count(name) > 1), None):
            raise ValueError(f"name=[{','.join(names)}]: two studies named {twice}; give one, or rename its folder")
        return studies

    @classmethod
    def list_studies(cls, runs_dir: str | Path) -> list[StudyFolder]:
        """Return the studies of a pool, by name; a hidden folder is one that is being removed."""
        files = sorted((Path(runs_dir) / "studies").glob("*/study.json"))
        return [cls(path.parent) for path in files if not path.parent.name.startswith(".")]

    def write(self, run_ids: Sequence[str], **more: Any) -> None:
        for folder in (self.path, self.results):
            remove_abandoned(folder)
        write_json(self.file, {"name": self.path.name, "run_ids": list(run_ids), **more})

    def read(self) -> dict[str, Any]:
        """Return the study's record.

        Raises:
            ValueError: it is missing (the message names the existing studies) or damaged.
        """
        if not self.file.exists():
            there = sorted(path.parent.name for path in self.path.parent.glob("*/study.json"))
            raise ValueError(
                f"no study at {self.path}; "
                + (f"studies there: {', '.join(there)}" if there else "run python -m stability.sweep first")
            )
        record = read_json(self.file, StudyFile, REMEDY)
        listed = [*record["run_ids"], *(run_id for each in record.get("earlier", []) for run_id in each["run_ids"])]
        if other := [run_id for run_id in listed if not re.fullmatch(RUN_ID, run_id)]:  # else a path: "../../etc"
            why = f"its run_ids hold {other[0][:40]!r}, and a run's id is 12 hexadecimal digits"
            raise make_damage_error(self.file, why, REMEDY)
        return record

    def run_ids_on_record(self) -> set[str]:
        """Return the ids of all runs of the study, also unreported ones.

        The latter come from earlier commands.

        Raises:
            ValueError: the record is missing or damaged (`read`).
        """
        record = self.read()
        return {*record["run_ids"], *(run_id for each in record.get("earlier", []) for run_id in each["run_ids"])}

    def drop_run(self, run_id: str) -> None:
        """Take a run off the record; the study's commands train and list it again."""
        record = self.read()
        earlier = [
            {**each, "run_ids": [other for other in each["run_ids"] if other != run_id]}
            for each in record.get("earlier", [])
        ]
        more = {key: value for key, value in record.items() if key not in ("name", "run_ids", "earlier")}
        if kept := [each for each in earlier if each["run_ids"]]:
            more["earlier"] = kept
        self.write([other for other in record["run_ids"] if other != run_id], **more)

    def runs(self) -> list[RunDirectory]:
        return [RunDirectory(self.pool, run_id) for run_id in self.read()["run_ids"]]
