"""Docstrings can be read alone: none begins with a word that leans on the name above it, and no long function has none.

The rule (CONTRIBUTING): a function's first sentence says in the imperative what it does or returns ("Return the number
of …", "Draw …"), so that it begins with one of `VERBS`; another verb is added there on purpose. What a module, a class
or a property is may be a noun phrase ("The number of tokens of one step."), a property also "Whether …": of theirs this
test knows the openings of sentences that have lost their verb ("Of a block, each with …", "Those of a run, ranks 1 to
…"). A class's begins with a capitalised word and has four or more before its first stop, so that it says what the class
is before it gives a formula or lists fields ("A batch of images, …", not "``images``: uint8" nor "y = Wx"). Words that are a noun as well ("Name and sha256 of …") are for the reader to see.

Names in backticks are ours: those that begin with a module of ours must be found there, so that a move takes them along.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("stability", "analysis", "sweeps", "benchmarks")
OURS = (*FOLDERS, "kernels")  # where names in backticks may stand
OPENINGS = """
    About Above As At Below Beside By Errors For From How If In None Nothing Of On That Those Until What When Where
    Whether Which Who Why With Within Without
"""
VERBS = """
    Add Adjust Append Ask Attend Begin Bracket Bring Build Call Cancel Carry Change Check Choose Claim Clamp Close
    Collect Compare Compute Concatenate Copy Corrupt Count Create Cut Decide Decode Describe Do Draw Drop Embed End
    Estimate Factor Fill Find Follow Forget Frame Free Gather Give Go Group Hand Have Import Insert Join Judge Keep
    Kill Lay Leave Let List Load Look Make Mark Mask Measure Mix Name Normalise Note Open Pad Parse Pass Perform
    Place Prepare Print Publish Put Queue Quote Raise Rank Read Record Refresh Refuse Register Remember Remove
    Repeat Replace Report Reset Resume Return Reverse Run Sample Say Scale Send Set Settle Share Shorten Show
    Silence Solve Sort Split Stack Start Step Stop Submit Summarise Take Tell Time Train Turn Unmask Validate Wait
    Walk Warm Work Wrap Write Yield
"""
CLIPPED, IMPERATIVES = frozenset(OPENINGS.split()), frozenset(VERBS.split())
SHORTEST = 4  # words by which a class's docstring says what the class is
CAPITALISED = re.compile(r"[A-Z][\w'’-]*,?")
LONG = 12  # lines from which a function says what it does
FILES = ("json", "jsonl", "py", "svg", "toml", "yaml")  # what a file's name ends in is no name of ours
BACKTICKED = re.compile(r"(?<!`)`(\w+(?:\.\w+)*)`(?!`)")

Node = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def definitions(source: str) -> Iterator[Node]:
    """Yield the module and every class and function in it, methods and nested ones among them."""
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, Node))


def is_property(node: Node) -> bool:
    return not isinstance(node, ast.Module) and any("property" in ast.unparse(each) for each in node.decorator_list)


def is_told_elsewhere(node: Node) -> bool:
    """Return whether a class's docstring (of a constructor) or a module's (of `main`) describes a function."""
    return isinstance(node, ast.Module | ast.ClassDef) or node.name in ("__init__", "main")


def begins_well(node: Node, first: str) -> bool:
    """Return whether a docstring may begin with this word: a function's with a verb, a property's with "Whether"."""
    if isinstance(node, ast.Module | ast.ClassDef) or is_property(node):
        return first not in CLIPPED or (is_property(node) and first == "Whether")
    return first in IMPERATIVES


def says_what_it_is(docstring: str) -> bool:
    """Return whether a class's docstring opens with words, not with a formula, a field or a mere name."""
    opening = re.split(r"[.:;](?:\s|$)", " ".join(docstring.split()), maxsplit=1)[0].split()
    return len(opening) >= SHORTEST and CAPITALISED.fullmatch(opening[0]) is not None


def faults(source: str) -> list[str]:
    """Return what is wrong with a file's docstrings, by the names that they stand under."""
    found = []
    for node in definitions(source):
        name, docstring = getattr(node, "name", "the module"), ast.get_docstring(node)
        if docstring is None:
            lines = 0 if isinstance(node, ast.Module) else (node.end_lineno or 0) - node.lineno + 1
            if lines >= LONG and not is_told_elsewhere(node):
                found.append(f"{name}: {lines} lines and no docstring")
        elif not begins_well(node, first := docstring.split()[0].rstrip(",:;.")):
            found.append(f"{name}: a docstring begins with {first!r}")
        elif isinstance(node, ast.ClassDef) and not says_what_it_is(docstring):
            found.append(f"{name}: a class's docstring says {docstring.splitlines()[0]!r} and not what it is")
    return found


def identifiers(source: str) -> set[str]:
    """Return all names that a file's code has, those of attributes, arguments and imports among them, and strings of
    one word; no words of its docstrings and comments."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        each = (getattr(node, field, None) for field in ("name", "id", "attr", "arg", "asname", "value"))
        found |= {word for name in each if isinstance(name, str) and " " not in name for word in name.split(".")}
    return found


@cache
def modules() -> dict[str, set[str]]:
    """Return the names in every module of ours, by its dotted path; a package also has its modules."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in sorted(file for folder in OURS for file in (ROOT / folder).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join(parts)] |= identifiers(file.read_text("utf-8"))
        for length in range(1, len(parts)):
            found[".".join(parts[:length])].add(parts[length])
    return found


def is_stale(name: str, known: Mapping[str, set[str]]) -> bool:
    """Return whether a name in backticks looks like one of ours and is none.

    Looked up are dotted names that begin with one of `OURS`, a module's own name or ``_``, and single names that
    begin with ``_``. What follows the module's name may stand anywhere in that module. Not looked up are names that
    begin with a class (`Found.lr`), with what is no module of ours (`nn.Linear`), or with a package's own name, which
    others share (`ray.init`).
    """
    first, *rest = parts = name.split(".")
    if name.startswith("__") or parts[-1] in FILES:
        return False
    if first in OURS:
        length = max(length for length in range(1, len(parts) + 1) if ".".join(parts[:length]) in known)
        paths, rest = [".".join(parts[:length])], parts[length:]
    else:
        paths = [path for path in known if path.endswith(f".{first}") and not (ROOT / path.replace(".", "/")).is_dir()]
    if not paths:
        return first.startswith("_") and (bool(rest) or not any(first in names for names in known.values()))
    return not any(set(rest) <= known[path] for path in paths)


def stale_names(source: str, known: Mapping[str, set[str]]) -> list[str]:
    """Return the names in backticks in a file's docstrings that are no longer ours."""
    docstrings: Iterable[str] = (ast.get_docstring(node) or "" for node in definitions(source))
    return [name for docstring in docstrings for name in BACKTICKED.findall(docstring) if is_stale(name, known)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_can_be_read_without_the_name_above_them(folder):
    names = [file.relative_to(ROOT).as_posix() for file in sorted((ROOT / folder).rglob("*.py"))]
    assert names
    found = {name: faults((ROOT / name).read_text("utf-8")) for name in names}
    assert not {name: each for name, each in found.items() if each}


def test_clipped_openings_and_long_functions_without_a_docstring_are_seen():
    body = "\n".join(f"    x = {number}" for number in range(LONG))
    source = f'''"""What a thing is."""
class A:
    """Those of a run."""
    @property
    def is_open(self):
        """Whether it is open."""
    @property
    def count(self):
        """How many there are."""
    @property
    def size(self):
        """The number of blocks."""
    def __init__(self):
{body.replace("    ", "        ")}
    def share(self):
        """The share of blocks."""
def f():
    """Of a block."""
def g():
{body}
def h():
    """Return the number of blocks."""
    def inner():
        """`Block` or none."""
'''
    assert faults(source) == [
        "the module: a docstring begins with 'What'",
        "A: a docstring begins with 'Those'",
        "f: a docstring begins with 'Of'",
        f"g: {LONG + 1} lines and no docstring",
        "count: a docstring begins with 'How'",
        "share: a docstring begins with 'The'",
        "inner: a docstring begins with '`Block`'",
    ]


def test_classes_that_open_with_no_words_about_them_are_seen():
    bad = [
        "``x``: what it holds.",
        "`search=asha`: halving of a grid of runs.",
        "y = Wx + b for every position alone.",
        "L(params) = the mean of all batches.",
        "(B, N, D): the sum of all tracks.",
        "% stable of two series of runs.",
        "One step.",
        "A log's view: a line for each trial.",
        "No settings.",
    ]
    good = [
        "A loss as a function, L(params).",
        "Gated streams (`Streams`) whose mix is learned.",
        "GPT-2's byte-pair encoding as it is.",
    ]
    source = "\n".join(f'class C{number}:\n    """{text}"""' for number, text in enumerate([*bad, *good]))
    assert [each.partition(":")[0] for each in faults(source)] == [f"C{number}" for number in range(len(bad))]


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_in_backticks_are_still_there(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    found = {file.relative_to(ROOT).as_posix(): stale_names(file.read_text("utf-8"), modules()) for file in files}
    assert not {name: each for name, each in found.items() if each}


def test_names_in_backticks_that_are_gone_are_seen():
    known = {
        "stability": {"corpora"},
        "stability.corpora": {"alphabets", "_pile"},
        "stability.corpora.alphabets": identifiers("class Piece:\n    size = 1\n\ndef _order(): ..."),
        "stability.corpora._pile": set(),
    }
    there = (
        "`alphabets.Piece` `alphabets.Piece.size` `stability.corpora.alphabets.Piece` `stability.corpora` `_pile` "
        "`_order` `__init__` `nn.Linear` `Piece.gone` `alphabets.json` ``alphabets.GONE`` `gone`"
    )
    gone = ["alphabets.GONE", "_tables.Piece", "_gone", "stability.gone", "stability.corpora.alphabets.GONE"]
    source = f'"""{there}"""\ndef f():\n    """Return {" or ".join(f"`{name}`" for name in gone)}."""'
    assert stale_names(source, known) == gone
