"""Name a study that the user did not name, by the words that say what it is."""

from __future__ import annotations

import re
from pathlib import Path

from stability.cli.places import places_in
from stability.cli.words import CHOICES, SHORT, Invocation

# keys that change where or how a sweep runs, not what it is: they never enter its name
LABELS = (
    "name",
    "runs_dir",
    "reports_dir",
    "launcher",
    "logger",
    "device",
    "dry_run",
    "plan_gpu",
    "report",
    "cpus_per_trial",
    "gpus_per_trial",
    "plugins",
    "study",
)
LABELS += ("retry", "search.num", "search.batch")  # how far a sweep goes
LAUNCHERS = ("ray.", "slurm.", "devices_per_trial", "shard_parameters")  # their settings, likewise


def study_name(invocation: Invocation) -> str:
    """Return the preset's name where nothing else was asked for, else a name made from the overrides: ``mechanism=sc
    lr=range`` → ``sc-range``."""
    given = {word.key: word.value or "" for word in invocation.words}
    asked = [_word(key, value) for key, value in given.items() if key not in LABELS and not key.startswith(LAUNCHERS)]
    named = ([given.get("study", "quickstart")] if "study" in given or not asked else []) + asked
    return "-".join(named)[:100].strip("-._+=") or "sweep"


def _word(key: str, value: str) -> str:
    is_place = places_in(SHORT.get(key, key)) is not None
    value = Path(value).name.split(".")[0] if is_place else value
    value = re.sub(r"[^A-Za-z0-9._+-]+", "", value.replace(",", "+"))
    return value if key in CHOICES or is_place else f"{key}{value}"
