"""Name a study from its command line, if the user gave no name."""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from pathlib import Path

from stability.cli.conf import choices
from stability.cli.places import count_places
from stability.cli.words import CHOICES, SHORT, Invocation
from stability.config.base import LONGEST_NAME

# keys that change how or where a sweep runs, not its runs: never part of its name
LABELS = (
    "name",
    "replace",
    "runs_dir",
    "reports_dir",
    "launcher",
    "logger",
    "device",
    "dry_run",
    "plan_gpu",
    "report",
    "tables",
    "reference",
    "primary",
    "cpus_per_trial",
    "gpus_per_trial",
    "plugins",
    "study",
)
LABELS += ("retry", "search.num", "search.batch")  # the extent of a sweep
LAUNCHERS = ("ray.", "slurm.", "devices_per_trial", "shard_parameters")  # prefixes of launcher settings, likewise
DIGITS = 6  # characters of the hash at the end of a name
EDGES = "-._+="
EXPONENT = re.compile(r"(?<=\d)[eE][-+](?=\d)")


def study_name(invocation: Invocation) -> str:
    """Return the preset's name, or a name from the overrides.

    For example, ``mechanism=sc lr=range`` gives ``sc-range``. The name ends in 6 digits of the sha256 of all words if a
    word cannot be recovered from it: other words, another name.
    """
    given = {word.key: word.value or "" for word in invocation.words}
    asked = {key: value for key, value in given.items() if key not in LABELS and not key.startswith(LAUNCHERS)}
    preset = [given.get("study", "quickstart")] if "study" in given or not asked else []
    words = "-".join([*preset, *(_shorten_word(key, value) for key, value in asked.items())])
    name = words[:LONGEST_NAME].strip(EDGES)
    if name and name == words and all(_is_whole(key, value) for key, value in asked.items()):
        return name
    parts = [*preset, *([key, _resolve_place(value) if _is_place(key) else value] for key, value in asked.items())]
    digits = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:DIGITS]
    return f"{words[: LONGEST_NAME - DIGITS - 1].strip(EDGES) or 'sweep'}-{digits}"


def _shorten_word(key: str, value: str) -> str:
    value = Path(value).name.split(".")[0] if _is_place(key) else value
    value = re.sub(r"[^A-Za-z0-9._+-]+", "", value.replace(",", "+"))
    return value if key in CHOICES or _is_place(key) else f"{key}{value}"


def _is_whole(key: str, value: str) -> bool:
    """Return whether a word can be recovered from its part of the name."""
    # yes for letters and digits or a flat list of them (signs only in exponents), and for a choice of one group only
    listed = re.fullmatch(r"\[([^\[\]]*)\]", value)
    plain = EXPONENT.sub("e", re.sub(r"\s*,\s*", "", listed[1] if listed else value))
    is_choice = key in CHOICES and value in _names_of_several_groups()
    return bool(re.fullmatch(r"[A-Za-z0-9._]+", plain)) and not is_choice and not _is_place(key)


def _is_place(key: str) -> bool:
    return count_places(SHORT.get(key, key)) is not None


def _resolve_place(value: str) -> str:
    """Return the absolute path of a file or folder, also after ``ckpt:`` or ``hf:``; any other value as typed."""
    kind = next((kind for kind in ("ckpt:", "hf:") if value.startswith(kind)), "")
    try:
        path = Path(value.removeprefix(kind)).expanduser()
        return f"{kind}{path.resolve()}" if path.exists() else value
    except (OSError, RuntimeError):  # too long for a path, or ~ of an unknown user
        return value


@cache
def _names_of_several_groups() -> frozenset[str]:
    """Return the choices that exist in more than one group, presets included, e.g. ``none``."""
    names = [name for group in (*CHOICES, "study") for name in choices(group)]
    return frozenset(name for name in names if names.count(name) > 1)
