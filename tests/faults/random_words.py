"""Random command lines: keys and values of every kind, right and wrong, as a tired user, a script or a spiteful friend
might write them."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any, NamedTuple

from pydantic import BaseModel

from stability.cli.conf import choices, conf_dir
from stability.config.base import AXES
from stability.config.parse import SPECS
from stability.config.run import RunSpec
from stability.registry import FAMILIES, Registry
from tests.reading import compose

# What each entry needs to get as far as the work itself, which the harness replaces; for most it is a folder that does
# not exist.
BASES: dict[str, tuple[str, ...]] = {
    "sweep": (),
    "hessian": ("ckpt=nowhere",),
    "probe": ("what=spectra", "ckpt=nowhere"),
    "generate": ("ckpt=nowhere", "num=2"),
    "report": ("name=nowhere",),
    "status": (),
    "train_tokenizer": (),
}
LAST: dict[str, tuple[str, ...]] = {"sweep": ("dry_run=true",)}
ENTRIES = ("sweep",) * 6 + ("hessian", "probe", "generate", "report", "status", "train_tokenizer", "train_tokenizer")

NUMBERS = (
    "0",
    "1",
    "2",
    "3",
    "-1",
    "1.5",
    "0.0",
    "-0",
    "1e-3",
    "1e400",
    "-1e400",
    "1e-400",
    "nan",
    "inf",
    "-inf",
    "NaN",
    "9" * 30,
    "-" + "9" * 30,
)
NUMBERS += (
    "9" * 5000,
    "1_000",
    "0x10",
    "007",
    "2147483648",
    "9223372036854775807",
    "9223372036854775808",
    "1000000000",
    "1e18",
    "99999999",
    "1e3",
)
WORDS = (
    "",
    "abc",
    "true",
    "false",
    "null",
    "None",
    "yes",
    "auto",
    "none",
    "all",
    "???",
    "missing",
    "nano",
    "sa",
    "[sa,sc]",
    "mlm",
    "a b",
    "x=y",
    "a=b=c",
)
NESTED = (
    "[]",
    "{}",
    "[[]]",
    "[1,2]",
    "[1,[2,[3]]]",
    "[a,a]",
    "{a:1}",
    "{a:{b:[1]}}",
    "[{a:1}]",
    "[true]",
    "[null]",
    "{name:sc}",
    "[nan]",
    "[1e-3,1e-3]",
)
NESTED += (
    "{low:1,high:2}",
    "{low:2,high:1}",
    "{low:a,high:b}",
    "{low:nan,high:inf}",
    "[" * 60 + "]" * 60,
    "1,2",
    "a,b",
    "range(1,4)",
    "choice(a,b)",
)
NESTED += (
    "[" + "1," * 3000 + "1]",
    "{1:2}",
    "{true:1}",
    "{null:x}",
    "{a:1,a:2}",
    "glob(*)",
    "int(3.7)",
    "str([1])",
    "sort(3,1)",
    "shuffle(1,2)",
    "foo(1)",
)
BROKEN = (
    "[",
    "]",
    "{",
    "}",
    "(",
    ")",
    "a(b",
    "[1,2",
    "{a:",
    "'",
    '"',
    "'abc",
    'abc"',
    "a'b",
    "a,",
    ",",
    ":",
    "a:b:c",
    "[,]",
    "=",
    "==",
    "\\",
    "a\\",
    "#",
    "@",
)
HOSTILE = (
    "_target_=os.system",
    "{_target_:os.system}",
    "${oc.env:HOME}",
    "${oc.env:NO_SUCH_VARIABLE}",
    "${steps}",
    "${nothing}",
    "${",
    "${}",
    "$HOME",
    "}${{",
)
HOSTILE += (
    "${now:%Y}",
    "${oc.decode:1}",
    "[${oc.env:HOME}]",
    "a${oc.env:HOME}b",
    "\\${oc.env:HOME}",
    "../../etc",
    "../../../../etc/passwd",
    "/etc",
    "/",
    ".",
)
HOSTILE += (
    "..",
    "~",
    "~root",
    "/dev/null",
    "/proc/self/mem",
    "-",
    "--help",
    "*",
    "os",
    "os.system",
    "stability.sweep",
    "a..b",
    ".a",
    "a.",
    "0.5.1",
    "..",
)
ODD = (
    "é",
    "名前",
    "ä" * 300,
    "x" * 5000,
    "a\nb",
    "\n",
    "a\tb",
    "\x1b[31mred",
    "\x07",
    "\r",
    "a\x7f",
    "\u2028",
    "\udc80",
    "\ufeff",
    "\u202eabc",
    "🙂",
)
ODD += (" ", "  a  ")
VALUES = (NUMBERS, NUMBERS, NUMBERS, WORDS, WORDS, NESTED, NESTED, BROKEN, HOSTILE, HOSTILE, ODD)
PLAIN = (
    "1",
    "2",
    "3",
    "16",
    "0.5",
    "true",
    "false",
    "null",
    "[1,2]",
    "[sa]",
    "1e-3",
    "99999999",
    "10000000000",
    "9" * 30,
    "-1",
    "abc",
    "1e18",
    "1e300",
)
ABSURD_KEYS = (
    "",
    ".",
    "..",
    "a.b.c",
    "hydra.run.dir",
    "hydra.verbose",
    "hydra/launcher",
    "hydra.searchpath",
    "study/../x",
    "model@x",
    "@",
    "@model",
)
ABSURD_KEYS += (
    "__class__",
    "_target_",
    "0",
    "[0]",
    "mechanism[0]",
    "model.",
    ".model",
    "model..width",
    "é",
    "x" * 400,
    "a b",
    "--config-name",
    "-m",
    "'name'",
)
ABSURD_KEYS += (
    "mechanism.0",
    "seeds.a",
    "model.width.x",
    "lr.values.0",
    "ablate",
    "ablate.sc",
    "ablate.sc.window",
    "ablate.xx.y",
    "ablate.sc.window.x",
    "a[",
)
ABSURD_KEYS += (
    "search.space.lr_peak",
    "search.space.mechanism.sc.step_size",
    "search.space",
    "search.space.x",
    "search.space.seed",
    "a\nb",
    "a:b",
    "_self_",
)
ABSURD_KEYS += (
    "model@model",
    "mechanism@residual",
    "defaults",
    "study/quickstart",
    "/model",
    "model/",
    "${steps}",
    "curvature@_here_",
    "mechanism.sc.name",
)


class Line(NamedTuple):
    """``argv`` of an entry, and the words of it that were drawn."""

    entry: str
    argv: tuple[str, ...]
    drawn: tuple[str, ...]


def draw(random: Random) -> Line:
    """One command line; half of them have a single drawn word, so that what is said of it can be judged."""
    entry = random.choice(ENTRIES)
    words = [_word(random, entry) for _ in range(random.choice((1, 1, 1, 2, 3)))]
    if random.random() < 0.05:
        words.append(random.choice(words))
    return line_of(entry, words)


def line_of(entry: str, words: Sequence[str]) -> Line:
    """The line of some words: an entry's own before them, as far as they give none of the same key."""
    given = {word.lstrip("+").partition("=")[0] for word in words if "=" in word}
    base = [word for word in BASES[entry] if word.partition("=")[0] not in given]
    return Line(entry, (*base, *words, *LAST.get(entry, ())), tuple(words))


def _word(random: Random, entry: str) -> str:
    if random.random() < 0.35:  # well written, so that it gets far
        return f"{random.choice(chosen_keys(entry))}={random.choice(PLAIN)}"
    key, value = _key(random, entry), random.choice(random.choice(VALUES))
    if random.random() < 0.15 and key in GROUPS:
        value = random.choice(
            (
                *choices(key),
                *choices(random.choice(GROUPS)),
                f"[{','.join(choices(key)[:3])}]",
                f"../{key}/{choices(key)[0]}",
            )
        )
    form = random.random()
    if form < 0.72:
        return f"{key}={value}"
    if form < 0.93:
        return f"{random.choice(('+', '++', '~', '~~', '+~'))}{key}={value}"
    return random.choice((f"~{key}", key, f"={value}", value))


def _key(random: Random, entry: str) -> str:
    kind, real = random.random(), random.choice(keys(entry))
    if kind < 0.55:
        return real
    if kind < 0.70:
        return random.choice(GROUPS)
    if kind < 0.80:
        return _misspelt(random, real)
    if kind < 0.85:
        return f"{real}.{random.choice(('foo', 'name', '0', 'window', ''))}"
    if kind < 0.88:
        return random.choice(keys(random.choice(ENTRIES)))
    return random.choice(ABSURD_KEYS)


def _misspelt(random: Random, key: str) -> str:
    place = random.randrange(len(key))
    before, letter, after = key[:place], key[place], key[place + 1 :]
    return random.choice(
        (before + after, before + 2 * letter + after, f"{before}z{letter}{after}", key.upper(), f"{key}s")
    )


GROUPS = tuple(sorted(path.name for path in conf_dir().iterdir() if path.is_dir()))


@cache
def chosen_keys(entry: str) -> tuple[str, ...]:
    """Every dotted key of an entry's composed config."""
    return tuple(_of_values(compose(entry, BASES[entry])))


@cache
def keys(entry: str) -> tuple[str, ...]:
    """Every dotted key that an entry's composed config or its pydantic model has, whatever is chosen."""
    composed = [compose(entry, BASES[entry])]
    if entry == "sweep":
        composed += [
            compose(entry, [f"study={study}"])
            for study in ("curvature", "protein_mini", "residuals_mini", "attentionx_vit_mini")
        ]
    found = [key for values in composed for key in _of_values(values)]
    found += [key for model in (SPECS[entry], *([RunSpec] if entry == "sweep" else [])) for key in _of_model(model)]
    if entry in ("sweep", "train_tokenizer"):
        found += [
            f"{_group(family)}.{name}.{key}" if family in AXES.values() else f"{_group(family)}.{key}"
            for family, name, key in _of_parts()
        ]
    return tuple(sorted(set(found)))


def _group(family: str) -> str:
    return {"data": "data"}.get(family, family.removesuffix("s"))


def _of_values(values: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        found.append(f"{prefix}{key}")
        if isinstance(value, dict):
            found += _of_values(value, f"{prefix}{key}.")
    return found


def _of_model(model: type[BaseModel], prefix: str = "") -> list[str]:
    found = []
    for key, field in model.model_fields.items():
        found.append(f"{prefix}{key}")
        for inner in _models_in(field.annotation):
            found += _of_model(inner, f"{prefix}{key}.")
    return found


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for inner in typing.get_args(annotation) for model in _models_in(inner)]


def _of_parts() -> list[tuple[str, str, str]]:
    return [
        (family, name, key)
        for family in FAMILIES
        for name in Registry(family).names()
        for key in _of_model(Registry(family).load(name).Config)
    ]
