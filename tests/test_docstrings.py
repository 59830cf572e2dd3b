"""A function's docstring begins with a verb, and names in backticks are still there; ruff's `D` holds the rest.

Another verb is added to `VERBS` on purpose. A property's docstring may be a noun phrase.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("stability", "analysis", "sweeps", "benchmarks")
FILES = {
    file: file.read_text("utf-8") for each in (*FOLDERS, "kernels") for file in sorted((ROOT / each).rglob("*.py"))
}
VERBS = """
    Add Adjust Answer Append Ask Attend Begin Bracket Bring Build Call Cancel Carry Change Check Choose Claim Clamp Close
    Collect Compare Compute Concatenate Copy Corrupt Count Create Cut Decide Decode Describe Do Draw Drop Embed End
    Estimate Factor Fill Find Follow Forget Frame Free Gather Give Go Group Hand Have Import Insert Join Judge Keep
    Kill Lay Leave Let List Load Look Make Mark Mask Measure Mix Name Normalise Note Open Pad Parse Pass Perform
    Place Prepare Print Publish Put Queue Quote Raise Rank Read Record Refresh Refuse Register Remember Remove
    Repeat Replace Report Reset Resume Return Reverse Run Sample Say Scale Send Set Settle Share Shorten Show
    Silence Solve Sort Split Stack Start Step Stop Submit Summarise Take Tell Time Train Turn Unmask Validate Wait
    Walk Warm Work Wrap Write Yield
"""
IMPERATIVES = set(VERBS.split())
MODULE_AND_NAME = re.compile(r"(?<!`)`((?:\w+\.)*\w+)\.(\w+)`(?!`)")


def docstrings(source: str) -> dict[str, str]:
    """Return the docstrings of a file's functions by name, without those of properties."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    plain = (node for node in functions if "property" not in "".join(map(ast.unparse, node.decorator_list)))
    return {node.name: text for node in plain if (text := ast.get_docstring(node))}


def words_by_module() -> dict[str, set[str]]:
    """Return the words of every module outside of backticks, by its dotted path and, of no package, its own name."""
    found: dict[str, set[str]] = defaultdict(set)
    for file, text in FILES.items():
        path = file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        names = {path, *([] if file.stem == "__init__" else [file.stem])}
        for name in names:
            found[name] |= set(re.findall(r"\w+", re.sub(r"`[^`]*`", "", text)))
        package, _, name = path.rpartition(".")
        found[package].add(name)
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_docstring_of_a_function_begins_with_a_verb(folder):
    of_folder = {file: docstrings(text) for file, text in FILES.items() if file.is_relative_to(ROOT / folder)}
    assert any(of_folder.values())
    others = [
        (file, each)
        for file in of_folder
        for each in of_folder[file].items()
        if each[1].split()[0].rstrip(".,:;") not in IMPERATIVES
    ]
    assert not others


def test_names_in_backticks_are_still_there():
    words = words_by_module()
    named = [(file, *pair) for file, text in FILES.items() for pair in MODULE_AND_NAME.findall(text)]
    looked_up = [(file, module, name) for file, module, name in named if module in words]
    assert len(looked_up) > 50
    gone = [
        each for each in looked_up if each[2] not in words[each[1]] | {"json", "jsonl", "py", "svg", "toml", "yaml"}
    ]
    assert not gone
