"""Describe words on the command line that Hydra rejects or would misread.

Messages quote each word as typed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

from stability.cli.conf import FAMILY_OF, NO_PART, choices, defaults, describe_unknown_key, is_group, yamls
from stability.cli.words import A_RATE, Invocation, Word
from stability.config.base import AXES, choices_of, describe_missing
from stability.config.parse import SPECS
from stability.printable import line_of, visible
from stability.registry import Registry, near_misses

LONGEST_SHOWN = 80  # longest part of a word that a message repeats, in characters
# lengths in a message, in characters: of a quoted word of the command line (mostly a path), and of a line
LONGEST_PART, LONGEST_LINE = 300, 600
LONGEST_KEY = 200  # Hydra searches for a file with the key's name; file names have at most 255 characters
MOST_ELEMENTS = 2000  # longest list: Hydra's parser needs seconds for it, and its time grows with the square
MORE = "(-h shows more)"
LISTED = (*AXES, "lr", "plugins", "logger")  # keys of a sweep with several values in brackets


def shorten(text: str, longest: int = LONGEST_SHOWN) -> str:
    """Return the text on one line; a long one is cut and its length added.

    Control characters and invalid UTF-8 are escaped.
    """
    short = text if len(text) <= longest else f"{text[:longest]}… ({len(text):,} characters)"
    return visible(short)


def make_printable(message: str, invocation: Invocation) -> str:
    """Return a message safe for a terminal: quoted words as in `shorten`, and no line longer than a few rows."""
    parts = {part for word in invocation.words for part in (str(word), f"{word.sign}{word.key}", word.value or "")}
    unprintable = [part for part in parts if len(part) > LONGEST_PART or visible(part) != part]
    for part in sorted(unprintable, key=len, reverse=True):
        message = message.replace(part, shorten(part, LONGEST_PART))
    return "\n".join(shorten(line, LONGEST_LINE) for line in message.split("\n"))


def check_repetitions(invocation: Invocation) -> None:
    """Refuse a key with two values: Hydra would silently use the last.

    Raises:
        ValueError: a key has two values; one line.
    """
    first: dict[str, tuple[Word, str | None]] = {}
    for word in invocation.words:
        for set_by_it in word.to_hydra():
            if not set_by_it.key or set_by_it.value is None or set_by_it.sign.startswith("~"):
                continue
            other, value = first.setdefault(set_by_it.key, (word, set_by_it.value))
            if value != set_by_it.value:
                raise ValueError(_describe_repetition(invocation, set_by_it.key, other, word))


def _describe_repetition(invocation: Invocation, key: str, first: Word, second: Word) -> str:
    """Describe two words for one key; ``key`` is the one given to Hydra."""
    if first.key != second.key:  # e.g. init=… and init.source=…
        return f"{shorten(str(first))} and {shorten(str(second))} both set {key}; give one of them"
    values = list(dict.fromkeys(word.value or "" for word in invocation.words if word.key == first.key))
    names = list(dict.fromkeys(name for value in values for name in _names(value)))
    are_listed = first.key in LISTED and (first.key != "lr" or all(A_RATE.match(name) for name in names))
    whole = f"{first.key}=[{','.join(names)}]"
    remedy = f"several: {shorten(whole)}" if are_listed else "give it once"
    times = "twice" if len(values) == 2 else f"{len(values)} times"
    return f"{shorten(first.key)} is given {times} ({shorten(', '.join(values))}); {remedy}"


def check_words(invocation: Invocation, root: str) -> None:
    """Refuse words that Hydra would accept silently or fail on with an unexpected error.

    An expected error is a `HydraException`.

    Raises:
        ValueError: there is such a word; one line.
    """
    for word, after in pairwise(invocation.words):
        if after.value is None and (word.value or "").endswith(","):
            typed = shorten(f"{word} {after}")
            raise ValueError(f"{typed}: the list is cut at a space; write it without spaces: {word.key}=[a,b]")
    for word in invocation.words:
        typed = shorten(str(word))
        if (num_elements := str(word).count(",") + 1) > MOST_ELEMENTS:
            raise ValueError(f"{typed}: has {num_elements:,} elements; a list may have at most {MOST_ELEMENTS:,}")
        if word.value is None and not word.sign.startswith("~"):
            raise ValueError(f"'{typed}' is not of the form key=value; e.g. {_example(root, word)} {MORE}")
        if "${" in str(word):  # it could read the environment, and no record would contain its value
            raise ValueError(f"{typed}: '${{' is not replaced here; write the value itself, or let the shell insert it")
        if len(word.key) > LONGEST_KEY or not re.fullmatch(r"\w+(\.\w+)*", word.key, re.ASCII):
            raise ValueError(
                f"'{typed}' has no valid key; a key consists of names joined by dots, e.g. mechanism.sc.window=4 {MORE}"
            )
        if word.group == "hydra":
            raise ValueError(f"{typed}: settings of Hydra itself are not read here; leave it out {MORE}")
        if word.key in _groups(root):
            for override in word.to_hydra():  # lr=1e-3 becomes lr=values lr.values=[1e-3]
                if override.key == word.key and override.value is not None:
                    _check_choice(override.sign, override.key, override.value)


def _example(root: str, word: Word) -> str:
    """Return valid words for an entry: a sweep's, or the typed word as the value of the entry's subject."""
    fields = SPECS[root].model_fields
    subject = next((key for key in ("ckpt", "name") if key in fields), None)
    if "what" in fields and word.key in choices_of(fields["what"]):
        subject = "what"
    if root == "train_tokenizer":
        return "data=protein data.path=FOLDER"
    return "mechanism=sc lr=range" if root == "sweep" else f"{subject}={shorten(word.key)}"


@cache
def _groups(root: str) -> dict[str, str]:
    """Return the choices in the defaults list of an entry's yaml, by group."""
    return {group: choice for group, choice in defaults(root).items() if "@" not in group}


def _check_choice(sign: str, group: str, value: str) -> None:
    """Raise a ValueError if a word for a group names none of its choices."""
    if sign.startswith("+"):
        raise ValueError(
            f"{shorten(f'{sign}{group}={value}')}: {group} is chosen already, and nothing can be added to it; write "
            f"{group}={shorten(value)}"
        )
    if sign.startswith("~"):
        return
    names = _names(value)
    if group not in AXES and names != [value.strip()]:
        wanted = "a rate like 1e-3, a list like [1e-4,1e-3], or one name" if group == "lr" else "one name"
        raise ValueError(f"{group}={shorten(value)}: takes {wanted}; {near_misses(value, choices(group))}")
    known = choices(group)
    wrong = next((name for name in names if name not in known), None)
    if group == "mechanism" and wrong in set(choices("cross")) - set(NO_PART["cross"]):
        raise ValueError(
            f"mechanism={wrong} is a cross mechanism, it needs a context: cross={wrong} objective.context=64"
        )
    if group in AXES and "," in value and not value.strip().startswith("["):
        raise ValueError(f"{group}={shorten(value)}: a list is written in brackets: {group}=[{shorten(value)}]")
    for name in names:
        _check_code(group, name)
    if wrong is not None or not names:
        raise ValueError(
            f"{group}={shorten(value if wrong is None else wrong)}: no such choice"
            f"{' and no rate like 1e-3' if group == 'lr' else ''}; "
            f"{near_misses(shorten(wrong or value), known)}"
        )


def _check_code(group: str, name: str) -> None:
    """Raise a ValueError with both files' names if a part has a yaml and no code."""
    if group not in FAMILY_OF or name not in yamls(group) or name in NO_PART.get(group, ()):
        return
    family = FAMILY_OF[group]
    if name not in Registry(family).names():
        raise ValueError(
            f"{group}={name}: conf/{group}/{name}.yaml is there, stability/{family}/{name}.py is not; write it, with "
            "EXPORT = YourClass"
        )


def _names(value: str) -> list[str]:
    """Return the names in ``[sa,sc]`` or ``sa``, without quotes, valid or not."""
    text = value.strip()
    listed = text[1:-1].split(",") if text.startswith("[") and text.endswith("]") else [text]
    return [
        name
        for name in (re.sub(r"""^(['"])(.*)\1$""", r"\2", item.strip()) for item in listed)
        if name or len(listed) > 1
    ]


def explain_error(error: Exception, root: str, invocation: Invocation) -> str:
    """Describe an error of Hydra's parser or composition in one line.

    Args:
        error: Hydra's error.
        root: name of the entry's root yaml.
        invocation: the command line.
    """
    for word in invocation.words:
        if reason := _describe_syntax_error(word):
            return reason
    text = str(error).strip()
    if match := re.search(r"Could not override '([^']+)'", text):
        chosen = {key: value for key, value in invocation.given.items() if key in _groups(root) and is_group(key)}
        return describe_unknown_key(match.group(1), _keys(root, chosen), chosen)
    if "Missing mandatory value" in text:
        key = getattr(error, "full_key", "") or text.rsplit(" ", 1)[-1]
        return describe_missing(key, SPECS[root], key.split("."))
    word = _find_wrong_word(root, invocation)
    if word is None:
        return f"conf/{root}.yaml cannot be read, even without any word: {line_of(text)}"
    return f"{shorten(str(word))}: {_reason(text)}"


def _describe_syntax_error(word: Word) -> str | None:
    """Describe the syntax error in a word; None if there is none."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, value, typed = f"{word.sign}{word.key}", word.value or "", shorten(str(word))
    parser = OverridesParser.create()
    try:
        several = [override for override in word.to_hydra() if parser.parse_override(str(override)).is_sweep_override()]
    except (HydraException, ValueError, RecursionError):  # ValueError: a number with more digits than Python parses
        if re.search(r"\d{1000}", value):
            return f"{typed}: a number of that many digits cannot be read"
        as_text = (
            ""
            if "'" in value or not value.strip()
            else f"; to give this text itself, quote it: \"{shorten(key)}='{shorten(value)}'\""
        )
        return f"{typed}: this value cannot be read; give a number, a name or a list like [1,2]{as_text}"
    return f"{typed}: takes one value; a list is written in brackets, e.g. [1,2]" if several else None


def _keys(root: str, chosen: Mapping[str, str]) -> tuple[str, ...]:
    """Return the dotted keys of an entry's config with the given choices."""
    from omegaconf import OmegaConf

    from stability.cli.source import open_compose

    def walk(node: Any, prefix: str) -> Iterator[str]:
        for key, value in node.items() if isinstance(node, dict) else ():
            yield f"{prefix}{key}"
            yield from walk(value, f"{prefix}{key}.")

    with open_compose() as compose:
        config = compose(root, overrides=[f"{group}={choice}" for group, choice in chosen.items()])
    return tuple(walk(OmegaConf.to_container(config), ""))


def _find_wrong_word(root: str, invocation: Invocation) -> Word | None:
    """Return the word at which composing fails: all words before it compose; None if it fails without words."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from stability.cli.source import open_compose

    with open_compose() as compose:
        for number in range(len(invocation.words)):
            words = [str(word) for word in Invocation(invocation.words[:number]).overrides]
            try:
                OmegaConf.to_container(compose(root, overrides=words), resolve=True)
            except (HydraException, OmegaConfBaseException, ValueError, RecursionError):
                return invocation.words[number - 1] if number else None
    return invocation.words[-1] if invocation.words else None


def _reason(text: str) -> str:
    """Return Hydra's reason in this project's words."""
    if "Could not delete" in text:
        held = re.search(r"The value of '[^']*' is (.*) and not", text, re.DOTALL)
        return (
            "there is no key of that name to remove"
            if held is None
            else f"its value is {shorten(held.group(1))}; write only ~ and the key to remove it"
        )
    if "An item is already at" in text:
        return "the key exists already; leave the + out"
    if "Multiple values for" in text:
        return "is chosen twice; choose once"
    return f"this key takes another form of value; {MORE[1:-1]}"
