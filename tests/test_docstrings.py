"""Docstrings can be read alone: none begins with a word that leans on the name above it, and no long function has none.

The rule (CONTRIBUTING): a function's first sentence says in the imperative what it does or returns ("Return the number
of …", "Draw …"); what a module, a class or a property is may be a noun phrase ("The number of tokens of one step."), a
property also "Whether …". That a sentence has a verb is for the reader to see: this test knows the openings of
sentences that have lost theirs ("Of a block, each with …", "Those of a run, ranks 1 to …").
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("stability", "analysis", "sweeps", "benchmarks")
OPENINGS = """
    About Above As At Below Beside By Errors For From How If In None Nothing Of On That Those Until What When Where
    Whether Which Who Why With Within Without
"""
CLIPPED = frozenset(OPENINGS.split())
LONG = 12  # lines from which a function says what it does
TO_DO = ("sweeps/launchers/", "sweeps/search/")  # written before the rule, and not yet anew

Node = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def definitions(source: str) -> Iterator[Node]:
    """Yield the module and every class and function in it, methods and nested ones among them."""
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, Node))


def is_property(node: Node) -> bool:
    return not isinstance(node, ast.Module) and any("property" in ast.unparse(each) for each in node.decorator_list)


def is_told_elsewhere(node: Node) -> bool:
    """Return whether a class's docstring (of a constructor) or a module's (of `main`) describes a function."""
    return isinstance(node, ast.Module | ast.ClassDef) or node.name in ("__init__", "main")


def faults(source: str) -> list[str]:
    """Return what is wrong with a file's docstrings, by the names that they stand under."""
    found = []
    for node in definitions(source):
        name, docstring = getattr(node, "name", "the module"), ast.get_docstring(node)
        if docstring is None:
            lines = 0 if isinstance(node, ast.Module) else (node.end_lineno or 0) - node.lineno + 1
            if lines >= LONG and not is_told_elsewhere(node):
                found.append(f"{name}: {lines} lines and no docstring")
        elif (first := docstring.split()[0].rstrip(",:;.")) in CLIPPED and not (
            is_property(node) and first == "Whether"
        ):
            found.append(f"{name}: a docstring begins with {first!r}")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_can_be_read_without_the_name_above_them(folder):
    names = [file.relative_to(ROOT).as_posix() for file in sorted((ROOT / folder).rglob("*.py"))]
    assert names
    found = {name: faults((ROOT / name).read_text("utf-8")) for name in names if not name.startswith(TO_DO)}
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
    def __init__(self):
{body.replace("    ", "        ")}
def f():
    """Of a block."""
def g():
{body}
def h():
    """Return the number of blocks."""
'''
    assert faults(source) == [
        "the module: a docstring begins with 'What'",
        "A: a docstring begins with 'Those'",
        "f: a docstring begins with 'Of'",
        f"g: {LONG + 1} lines and no docstring",
        "count: a docstring begins with 'How'",
    ]
