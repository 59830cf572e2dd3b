"""Measure how the source reads: ``python -m benchmarks.house [--root=FOLDER] [--no-run]``.

Prints the table of issue 37, each number beside its target. ``--root`` measures another checkout; ``--no-run`` leaves
out the rows that need a short training run (half a minute). The definitions, printed below the table:

* source: every ``*.py`` of stability, sweeps, analysis and kernels, all lines; tests: every ``*.py`` of tests.
* moves and climbs: `benchmarks._walk`, from ``_sweep`` of stability.sweep and its ``spec``. The review of 60e7bdb
  counted 87 and 45 by a program that is lost; this one counts 93 and 42 there. The other rows that the review had come
  out as it had them. The walk does not follow a call's result, so that it ends early where ``_sweep`` makes a plan of
  the spec; the row after it goes on from ``_run`` and its ``plan``. The target is for both together.
* frames: functions of the source on the stack at the first ``optimizer.step``, from ``main`` on, comprehensions and
  lambdas left out; a generator that is being resumed is on the stack.
* files entered: those of the source in which any frame started or resumed, module bodies on import included; the step
  is the fourth of six.
* body lines: from the first statement after the docstring to the end, comments and blank lines within included.
* words: ``[A-Za-z][A-Za-z']*`` in the docstrings of modules, classes and functions.
* public functions: neither they nor a class or function around them begins with ``_``; a parameter is everything but
  ``self`` and ``cls``. One without a docstring lacks ``Args:``, but for a method that overrides one of a base class
  (also a protocol, at any distance) in the source whose docstring has ``Args:``: it counts as inherited.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._walk import AnyFunction, Definition, Project, name_module, walk

PACKAGES = ("stability", "sweeps", "analysis", "kernels")
EVENTS, SHORT_LINES, MANY_PARAMETERS = 400, 3, 3
WORDS = ("what", "which", "where")
ENTRY = "stability.sweep"
RUN = "mechanism=sc lr=3e-3 seeds=1 steps=6 launcher=serial hessian=false report=false logger=files device=cpu"


class Row(NamedTuple):
    """A row of the table: a measure's name, its value here, and the issue's target ("" without one)."""

    name: str
    value: str
    target: str


@dataclass(frozen=True)
class Reading:
    """Counts of functions and docstrings in some source files."""

    functions: int
    short_functions: int
    docstrings: int
    words: Counter[str]
    wide_functions: int  # public, of at least ``MANY_PARAMETERS`` parameters
    wide_with_args: int
    wide_inherited: int  # their ``Args:`` are in the method that they override

    def per_thousand(self, word: str) -> float:
        """Return a word's frequency in 1,000 words of docstrings."""
        return 1000 * self.words[word] / max(1, self.words.total())


def source_files(root: Path, packages: Sequence[str] = PACKAGES) -> list[Path]:
    """Return the Python files of the packages."""
    return [path for package in packages for path in sorted((root / package).rglob("*.py"))]


def count_lines(paths: Sequence[Path]) -> int:
    """Return the number of lines in some files."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def read_sources(root: Path, packages: Sequence[str] = PACKAGES, project: Project | None = None) -> Reading:
    """Parse a checkout's packages and count their functions and their docstrings' words.

    Args:
        root: the checkout.
        packages: its packages to read.
        project: their names, to find overridden methods; None: read here.
    """
    project = project or Project(root, packages)
    functions, short, docstrings, wide, with_args, inherited = 0, 0, 0, 0, 0, 0
    words: Counter[str] = Counter()
    for path in source_files(root, packages):
        module, tree = name_module(root, path), ast.parse(path.read_text())
        owners = {child: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for child in node.body}
        for node, is_public in _definitions(tree, True):
            text = ast.get_docstring(node)
            docstrings += text is not None
            words.update(word.lower() for word in re.findall(r"[A-Za-z][A-Za-z']*", text or ""))
            if isinstance(node, AnyFunction):
                functions += 1
                short += body_lines(node) <= SHORT_LINES
                is_wide = is_public and num_parameters(node) >= MANY_PARAMETERS
                wide += is_wide
                with_args += is_wide and has_args(node)
                if is_wide and text is None and node in owners:
                    inherited += inherits_args(project, Definition(module, owners[node]), node.name)
    return Reading(functions, short, docstrings, words, wide, with_args, inherited)


def has_args(function: ast.AST) -> bool:
    """Return whether a function's docstring has a section ``Args:``."""
    text = ast.get_docstring(function) if isinstance(function, AnyFunction) else None
    return re.search(r"^\s*Args:", text or "", re.MULTILINE) is not None


def inherits_args(project: Project, owner: Definition, name: str) -> bool:
    """Return whether a class's base in the project documents a method with ``Args:``.

    Args:
        project: names of the modules.
        owner: the class.
        name: the method's name.
    """
    found = [method for base in project.bases(owner) if (method := project.method(base, name)) is not None]
    return any(
        has_args(method.node) or inherits_args(project, Definition(method.module, method.owner), name)
        for method in found
        if method.owner is not None
    )


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _definitions(node: ast.AST, is_public: bool) -> Iterator[tuple[Documented, bool]]:
    """Yield modules, classes and functions, each with whether public names reach it."""
    if isinstance(node, Documented):
        is_public = is_public and not getattr(node, "name", "").startswith("_")
        yield node, is_public
        is_public = is_public and not isinstance(node, AnyFunction)  # a function within a function is not reachable
    for child in ast.iter_child_nodes(node):
        yield from _definitions(child, is_public)


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines in a function's body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return a function's number of parameters without ``self`` and ``cls``."""
    names = [argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)]
    return len([name for name in names if name not in ("self", "cls")])


def trace_run(root: Path, entry: str = ENTRY, words: Sequence[str] = tuple(RUN.split())) -> dict[str, Any]:
    """Train a short run in a temporary folder and count its frames and files.

    Args:
        root: the checkout.
        entry: module with a ``main`` for the words.
        words: the command line, without places; the run happens in the temporary folder.

    Returns:
        The counts from `benchmarks._traced.Recorder.counts`.

    Raises:
        RuntimeError: the command fails; the message ends with its last output.
    """
    script = Path(__file__).with_name("_traced.py")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts.json"
        # -P: the script's folder has files with names of packages
        command = [sys.executable, "-P", str(script), str(root.resolve()), str(out), entry, *words]
        environment = {**os.environ, "PYTHONPATH": str(root.resolve())}
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RuntimeError(f"{entry} {' '.join(words)} exits with {ended.returncode}: {ended.stderr[-2000:]}")
        return json.loads(out.read_text())


def static_rows(root: Path) -> list[Row]:
    """Return the rows computed from the source alone."""
    files, tests, analysis = source_files(root), source_files(root, ["tests"]), source_files(root, ["analysis"])
    project = Project(root, PACKAGES)
    reading = read_sources(root, PACKAGES, project)
    road = walk(project, ENTRY, "_sweep", "spec", EVENTS)
    try:
        rest = walk(project, ENTRY, "_run", "plan", EVENTS)
        carried = [Row(f"plan: moves / climbs in {rest.events} events", f"{rest.moves} / {rest.climbs}", "≤ 40 / ≤ 12")]
    except ValueError:  # a checkout that makes no plan
        carried = []
    size = f"{len(files)} / {count_lines(files):,}"
    share = 100 * reading.short_functions / max(1, reading.functions)
    means = ", ".join(f"{word} {reading.per_thousand(word):.1f}" for word in WORDS)
    return [
        Row("source files / lines", size, "≤ 520 / ≤ 60,000"),
        Row("test lines", f"{count_lines(tests):,}", "≤ 50,000"),
        Row(f"spec: moves / climbs in {road.events} events", f"{road.moves} / {road.climbs}", "≤ 40 / ≤ 12"),
        Row("spec: rooms in them", f"{road.rooms}", ""),
        *carried,
        Row("analysis lines / files", f"{count_lines(analysis):,} / {len(analysis)}", "≤ 11,000 / ≤ 90"),
        Row(f"functions of ≤ {SHORT_LINES} body lines", f"{share:.1f} % of {reading.functions:,}", "≤ 35 %"),
        Row("in 1,000 words of docstrings", means, "what ≤ 1"),
        Row("docstrings / their words", f"{reading.docstrings:,} / {reading.words.total():,}", ""),
        Row(
            f"public functions of ≥ {MANY_PARAMETERS} parameters with Args:",
            f"{reading.wide_with_args} + {reading.wide_inherited} inherited of {reading.wide_functions}",
            "all",
        ),
    ]


def run_rows(counts: dict[str, Any]) -> list[Row]:
    """Return the rows of a traced run."""
    frames = f"{counts['frames']} / {counts['frame_files']}"
    files = f"{counts['step']} / {counts['before']}"
    return [
        Row("frames / files from main to optimizer.step, serial", frames, "≤ 9 / ≤ 7"),
        Row("files entered in one step / before the first", files, "≤ 25 / ≤ 150"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="checkout that is measured")
    parser.add_argument("--no-run", action="store_true", help="leave out the rows of the traced run")
    options = parser.parse_args()
    rows = static_rows(options.root)
    counts = {} if options.no_run else trace_run(options.root)
    rows += run_rows(counts) if counts else []
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for row in rows:
        print(f"{row.name:{widths[0]}}  {row.value:{widths[1]}}  {row.target}".rstrip())
    if counts:
        print(f"\nmain to optimizer.step: {' → '.join(counts['chain'])}")
    print(f"\n{(__doc__ or '').partition('The definitions, ')[2]}".replace("printed below the table:", "Definitions:"))


if __name__ == "__main__":
    main()
