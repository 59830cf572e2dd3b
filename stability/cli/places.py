"""Find paths on the command line, and quote them for Hydra.

The keys of paths are the fields marked with `stability.config.identity.Place`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from pydantic import BaseModel

from stability.cli.conf import FAMILY_OF, is_group
from stability.cli.declared import Kind, read_settings
from stability.config.base import AXES
from stability.config.identity import Place, group_of
from stability.config.parse import SPECS
from stability.registry import Registry, plugins_of

QUOTES = ("'", '"')
# Hydra parses such a word to the same text with and without quotes, so its key's part need not be imported (torch)
WORD = re.compile(r"(?!(?:null|true|false|nan|inf)$)[A-Za-z_][\w.-]*", re.IGNORECASE)
ELEMENT = re.compile(r"""\s*('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^,]+)\s*(?:,|$)""")


def quote_value(key: str, value: str) -> str | None:
    """Return the value of ``key=value`` in Hydra's quotes; None if it needs none.

    Never quoted: a value that begins with a quote, ``null``, and a word (`WORD`). Any other value of a place is quoted;
    in ``[…]`` for a field of several places, each element that does not begin with a quote. Under any other key, text
    with a ``/`` is quoted, since no number has one; exceptions are text in brackets or with a backslash, and keys of
    groups of choices.
    """
    if value[:1] in QUOTES or value == "null" or WORD.fullmatch(value):
        return None
    if "/" in value and "\\" not in value and not _is_bracketed(value) and not is_group(key):
        return _add_quotes(value)
    holds = count_places(key)
    if holds == "several" and _is_bracketed(value):
        elements = [found.group(1).strip() for found in ELEMENT.finditer(value[1:-1])]
        return f"[{','.join(item if item[:1] in QUOTES else _add_quotes(item) for item in elements)}]"
    return None if holds is None else _add_quotes(value)


def quote_text(value: str) -> str:
    """Return a value that Hydra parses to this very text: in quotes, unless it does without.

    A value that begins with a quote is left as it is.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if value[:1] in QUOTES or WORD.fullmatch(value):
        return value
    try:
        parsed = OverridesParser.create().parse_override(f"text={value}")
        is_itself = not parsed.is_sweep_override() and parsed.value() == value
    except (HydraException, ValueError, RecursionError):
        is_itself = False
    return value if is_itself else _add_quotes(value)


def count_places(key: str) -> str | None:
    """Return ``one`` or ``several`` for a key with paths, as declared by its field; None for other keys."""
    return _entries_places().get(key) or next(
        ("several" if kind.is_list else "one" for kind in _settings_of(key) if kind.type == "path"), None
    )


def _is_bracketed(value: str) -> bool:
    return value[:1] + value[-1:] in ("[]", "{}")


def _add_quotes(value: str) -> str:
    """Quote a value for Hydra: a backslash is literal except before a quote, where it is doubled."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"


@cache
def _entries_places() -> dict[str, str]:
    """Return the places outside parts' settings, by key, of all entries; several if one entry takes several."""
    # "one" sorts before "several", which stays
    return dict(sorted(found for spec in SPECS.values() for found in _walk_places(spec, "")))


def _walk_places(config: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for key, field in config.model_fields.items():
        if found := _count_field_places(config, key):
            yield f"{prefix}{key}", found
        elif group := group_of(field.annotation):
            yield from _walk_places(group, f"{prefix}{key}.")


def _count_field_places(config: type[BaseModel], key: str) -> str | None:
    field = config.model_fields.get(key)
    if field is None or not any(isinstance(marker, Place) for marker in field.metadata):
        return None
    return "several" if "tuple" in str(field.annotation) else "one"


def _settings_of(key: str) -> Iterator[Kind]:
    """Yield the values of a key like ``mechanism.sc.window``, for each part that may have it."""
    group, *path = key.split(".")
    family = FAMILY_OF.get(group)
    if family is None or len(path) != (2 if group in AXES else 1):
        return
    # of this project's parts only data sources have places (tests/identity); plugins are all imported already
    names = {*plugins_of(family), *(Registry(family).names() if family == "data" else ())}
    for name in sorted(names):
        if (group not in AXES or name == path[0]) and path[-1] in (found := read_settings(family, name)):
            yield found[path[-1]].kind
