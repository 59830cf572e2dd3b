"""Read a command line into a validated spec.

Hydra composes the values, `stability.config.parse` validates them. A study without a name is named by its words.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from stability.cli.conf import choices, defaults, list_keys
from stability.cli.mistakes import check_words, explain_error, shorten
from stability.cli.places import count_places
from stability.cli.words import CHOICES, SHORT, Invocation, Word
from stability.config.base import AXES, LONGEST_NAME, AnySettings, Settings, check_numbers
from stability.config.parse import SPECS, parse
from stability.config.scale import read_axes
from stability.config.sweep import SweepSpec
from stability.registry import add_plugin
from stability.startup import uncollected

# root yaml in conf/ of each entry's spec
ROOTS: dict[type[Settings], str] = {spec: root for root, spec in SPECS.items()}
PRESET_ROOT = ROOTS[SweepSpec]  # the only entry with presets, in conf/study
# a text of the user's own without study or objective: next-token prediction, by those quickstart mechanisms that can
OWN_TEXT, NEXT_TOKEN = ("text", "hf"), (Word("", "objective", "ar"), Word("", "mechanism", "[sa,sw]"))


def read(kind: type[AnySettings], invocation: Invocation) -> AnySettings:
    """Return the spec of class ``kind`` for a command line.

    Raises:
        ValueError: a word or a value is invalid; one or two lines.
    """
    return parse(kind, compose_values(kind, invocation))


def compose_values(kind: type[Settings], invocation: Invocation) -> dict[str, Any]:
    """Return the plain values of a spec, not fully validated: no torch is imported.

    Raises:
        ValueError: as in `read`.
    """
    with uncollected():
        add_listed_plugins(invocation)
        values = compose(ROOTS[kind], invocation)
        if kind is SweepSpec:
            _refuse_searched(invocation, values)
            if values.get("name") is None:
                values["name"] = find_name(invocation, str(values.get("runs_dir")))
            values = read_axes(values)
        check_numbers(kind, values)
        return values


def compose(root: str, invocation: Invocation) -> dict[str, Any]:
    """Return the plain dict composed from ``conf/<root>.yaml`` and the overrides.

    Raises:
        ValueError: a word is invalid; one or two lines.
    """
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from stability.cli.source import open_compose

    check_words(invocation, root)
    _refuse_repetitions(invocation)
    invocation = _add_next_token(invocation) if root == PRESET_ROOT else invocation
    try:
        with open_compose() as hydra_compose:
            config = hydra_compose(root, overrides=[str(word) for word in invocation.overrides])
            if anew := _find_replaced_groups(root, invocation):
                words = [str(word) for word in invocation.overrides if word.group in anew]
                own = hydra_compose(root, overrides=["~study", *words])  # without the preset's settings
                for group in anew:  # parts of an axis that are still chosen keep their settings from the preset
                    config[group] = {name: config[group][name] for name in own[group]} if group in AXES else own[group]
            _drop_claim(config, invocation)
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    # Hydra raises ValueError itself, e.g. for ~model=7
    except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ValueError(explain_error(error, root, invocation)) from None


def _drop_claim(config: Any, invocation: Invocation) -> None:
    """Drop a preset's primary claim on a part that the command no longer chooses; claims on variants stay."""
    claim, names = config.get("primary"), {name for axis in AXES for name in config.get(axis) or ()}
    words = [word for word in (claim or "").rpartition(".")[0].split() if "=" not in word]
    if "primary" not in invocation.given and not names.issuperset(words):
        config["primary"] = None


def _add_next_token(invocation: Invocation) -> Invocation:
    """Add next-token prediction for a text of the user's own, unless study or objective are typed."""
    given = invocation.given
    if given.get("data") not in OWN_TEXT or {"study", "objective"} & {word.group for word in invocation.words}:
        return invocation
    return Invocation((*invocation.words, *(word for word in NEXT_TOKEN if word.key not in given)))


def _refuse_repetitions(invocation: Invocation) -> None:
    """Refuse ``residual=[hc,hc]``: Hydra would silently merge them."""
    for axis, value in invocation.given.items():
        names = re.findall(r"[^\[\],\s'\"]+", value) if axis in AXES else []
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise ValueError(f"{axis}={value}: {repeated[0]} is named {names.count(repeated[0])} times; give each once")


def _refuse_searched(invocation: Invocation, values: dict[str, Any]) -> None:
    """Refuse a typed setting that every point of `search=optuna` would replace, e.g. ``search=optuna lr=1e-3``."""
    search, lr = values.get("search"), values.get("lr")
    # SweepSpec refuses lr=edge and lr=scaled beside a search
    if not isinstance(search, dict) or not isinstance(lr, dict) or lr.get("edge") or lr.get("scaled"):
        return
    for word in invocation.words:
        path = "lr_peak" if word.group == "lr" else word.key
        varied = search.get("space")
        for step in path.split("."):
            varied = varied.get(step) if isinstance(varied, dict) else None
        if word.value is not None and isinstance(varied, dict) and {"low", "high"} <= varied.keys():
            ranges = f"search.space.{path}"
            is_typed = any(f"{word.key}.".startswith(f"{ranges}.") for word in invocation.words)
            what, another = path, ""
            if path == "lr_peak":  # a word of the searched space alone
                what, another = "the learning rate", f"give another range by {ranges}={{low:…,high:…}}, "
            other = "or that range" if is_typed else f"{another}or vary another setting instead and add {ranges}=null"
            raise ValueError(
                f"{shorten(str(word))}: search={search.get('name')} varies {what} from {varied['low']} to "
                f"{varied['high']} and would not use it; leave it out, {other}"
            )


def _find_replaced_groups(root: str, invocation: Invocation) -> list[str]:
    """Return groups with settings in the preset but another choice in the command; axes if named."""
    given = invocation.given
    named = [group for group in CHOICES if group in given]
    if root != PRESET_ROOT or not named:
        return []
    study = f"study/{given.get('study') or defaults(root)['study']}"
    preset, said = defaults(root) | defaults(study), list_keys(study)
    return [group for group in named if group in said and (group in AXES or given[group] != preset[group])]


def list_plugins(invocation: Invocation) -> list[str]:
    """Return the modules of ``plugins=[…]``.

    Raises:
        ValueError: the value is not a list.
    """
    given = [word.value for word in invocation.words if str(word).startswith("plugins=")]
    listed = given[0] if given and given[0] is not None else "[]"
    if not re.fullmatch(r"\s*\[.*\]\s*|null", listed, re.DOTALL):
        raise ValueError(f"plugins={listed}: must be a list of modules, e.g. plugins=[my_pkg.my_mechanism]")
    return re.findall(r"[^\s,\[\]'\"]+", listed.removeprefix("null"))


def add_listed_plugins(invocation: Invocation) -> None:
    """Register the modules of ``plugins=[my_pkg.my_mechanism]``; each is then chosen like a part of this project."""
    for module in list_plugins(invocation):
        add_plugin(module)


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
ROOM = LONGEST_NAME - DIGITS - 1  # characters before that hash
# of a name without every word: the groups that it says first
MOST_TELLING = ("study", "mechanism", "objective", "data", "optimizer")
LONGEST_LIST = 15  # characters of a list that leaves room for further such groups
FIRST_NAMED = (*MOST_TELLING, *(key for key in CHOICES if key not in (*MOST_TELLING, "lr")))
EDGES = "-._+="
EXPONENT = re.compile(r"(?<=\d)[eE][-+](?=\d)")


def find_name(invocation: Invocation, runs_dir: str) -> str:
    """Return a command's `study_name`, or its name by an older version if only that study is in the pool."""
    words, studies = _named_words(invocation), Path(runs_dir) / "studies"
    name, older = study_name(invocation), f"{_cut(words)}-{_digits(words)}"
    try:
        is_older = (studies / older / "study.json").exists() and not (studies / name / "study.json").exists()
    except OSError:  # not a folder's name; its own check refuses it
        return name
    return older if is_older else name


def study_name(invocation: Invocation) -> str:
    """Return the preset's name, or a name from the overrides.

    For example, ``mechanism=sc lr=range`` gives ``sc-range``. If a word cannot be recovered from it, the name begins
    with what is swept (`_front`) and ends in 6 digits of the sha256 of all words: other words, another name.
    """
    words = _named_words(invocation)
    name = _join_words(words)[:LONGEST_NAME].strip(EDGES)
    if name and name == _join_words(words) and all(key == "study" or _is_whole(key, value) for key, value in words):
        return name
    return f"{_front(words) or 'sweep'}-{_digits(words)}"


def _named_words(invocation: Invocation) -> list[tuple[str, str]]:
    """Return the words that change a sweep's runs, in order, the preset first; without any, the quickstart."""
    given = {word.key: word.value or "" for word in invocation.words}
    asked = {key: value for key, value in given.items() if key not in LABELS and not key.startswith(LAUNCHERS)}
    preset = [("study", given.get("study", "quickstart"))] if "study" in given or not asked else []
    return [*preset, *asked.items()]


def _join_words(words: Iterable[tuple[str, str]]) -> str:
    return "-".join(value if key == "study" else _shorten_word(key, value) for key, value in words)


def _digits(words: Iterable[tuple[str, str]]) -> str:
    parts = [
        value if key == "study" else [key, _resolve_place(value) if _is_place(key) else value] for key, value in words
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:DIGITS]


def _cut(words: Iterable[tuple[str, str]]) -> str:
    return _join_words(words)[:ROOM].strip(EDGES) or "sweep"


def _front(words: Sequence[tuple[str, str]]) -> str:
    """Return the words that fit in a name, the most telling first.

    These are preset, mechanisms, objective, data and optimizers, then other lists. A long list is cut: ``sa+sc+5more``.
    """
    ranks = {key: place for place, key in enumerate(FIRST_NAMED)}

    def rank(word: tuple[str, str]) -> tuple[int, bool, bool]:
        key, value = word
        group = "optimizer" if _is_place(key) and key.startswith("data.") else key  # after these
        is_list = value.startswith("[")
        return ranks.get(group, len(ranks)) + (key == "lr"), group != key, not is_list  # learning rates last

    name, ordered = "", sorted(words, key=rank)
    for number, (key, value) in enumerate(ordered):
        word = value if key == "study" else _shorten_word(key.removeprefix("model."), value)
        room = ROOM - len(name) - bool(name)
        shown = word if len(word) <= room else "" if key == "lr" and name else _shorten_list(word, room)
        if any(other in MOST_TELLING for other, _ in ordered[number + 1 :]):
            shown = _shorten_list(word, min(room, LONGEST_LIST)) or shown
        name = "-".join(filter(None, (name, shown.strip(EDGES))))
    return name or _cut(words)


def _shorten_list(word: str, room: int) -> str:
    """Return a word of at most ``room`` characters, of a list its first items and the number of others; else ""."""
    if len(word) <= room:
        return word
    items = word.split("+")
    for number in range(len(items) - 1, 0, -1):
        shown = f"{'+'.join(items[:number])}+{len(items) - number}more"
        if len(shown) <= room:
            return shown
    return ""


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
