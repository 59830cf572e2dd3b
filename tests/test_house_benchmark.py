"""`benchmarks.house` on made-up packages, whose numbers are counted by hand in the comments."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from benchmarks import house
from benchmarks._traced import Recorder
from benchmarks._walk import Project, Walk, walk

TWO_ROOMS = {
    "top.py": """
        from made.low import Box, read, touch

        def begin(spec, other):
            touch(spec.size)         # 1 event in top, 1 in low: a move down
            kept = spec              # 1 in top: a climb, a move up
            read(size=kept)          # 1 in top, then 2 in low (one in `deeper`): a move down
            box = Box(other)         # `other` is not followed
            spec = 3                 # no longer followed
            return spec, {"x": touch}["x"](other)
        """,
    "low.py": """
        class Base:
            def keep(self, value):
                return value

        class Box(Base):
            def __init__(self, spec):
                self.keep(spec)

        def touch(size):
            return size

        def read(*, size):
            return deeper(size)

        def deeper(size):
            return [size for _ in "ab"]
        """,
}
READ = {
    "words.py": '''
        """Say what is read, what not."""

        def plain(a, b):
            """Add."""

            # a comment
            return a + b

        def with_args(a, b, *, c):
            """Add three numbers.

            Args:
                a: a number.
            """
            total = a
            total += b
            total += c
            return total

        def without(a, *b, **c):
            def inner(x, y, z):
                return x
            return inner

        class _Hidden:
            def method(self, a, b, c):
                return a

        class Shown:
            def method(self, a, b):
                return a
        ''',
}
OVERRIDES = {
    "bases.py": '''
        class Base:
            def documented(self, a, b, c):
                """Add.

                Args:
                    a: a number.
                """

            def bare(self, a, b, c):
                """Add."""
        ''',
    "derived.py": '''
        from made.bases import Base

        class Middle(Base):
            def documented(self, a, b, c):
                return a

            def bare(self, a, b, c):
                return a

        class Far(Middle):
            def documented(self, a, b, c):
                return b

            def own(self, a, b, c):
                return c

        class Says(Base):
            def documented(self, a, b, c):
                """Multiply."""

            def bare(self, a, b, c):
                return a
        ''',
}
RUN = {
    "words.py": "def train(steps, step):\n    for _ in range(steps):\n        work()\n        yield step()\n\ndef work():\n    pass\n",
    "entry.py": """
        from made import words

        def main(steps, step):
            return run(steps, step)

        def run(steps, step):
            return [number for number in words.train(steps, step)]
        """,
    "unused.py": "",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    (folder / "made").mkdir()
    for name, text in {"__init__.py": "", **files}.items():
        (folder / "made" / name).write_text(textwrap.dedent(text).lstrip())
    return folder


def test_a_parameter_is_followed_into_another_room_and_back(tmp_path):
    # top, low | top, top, low, low: down, up, down; two rooms
    project = Project(write(tmp_path, TWO_ROOMS), ["made"])
    assert walk(project, "made.top", "begin", "spec", 100) == Walk(events=6, moves=3, climbs=1, rooms=2)


def test_the_walk_ends_at_its_limit(tmp_path):
    project = Project(write(tmp_path, TWO_ROOMS), ["made"])
    assert walk(project, "made.top", "begin", "spec", 3) == Walk(events=3, moves=2, climbs=1, rooms=2)


def test_methods_of_bases_and_constructors_are_entered(tmp_path):
    # `other` in top (1), in Box.__init__ (1), in Base.keep (1), and in top again (1): down, up
    project = Project(write(tmp_path, TWO_ROOMS), ["made"])
    assert walk(project, "made.top", "begin", "other", 100) == Walk(events=4, moves=2, climbs=1, rooms=2)


def test_an_unknown_start_is_refused(tmp_path):
    project = Project(write(tmp_path, TWO_ROOMS), ["made"])
    with pytest.raises(ValueError, match="no function end"):
        walk(project, "made.top", "end", "spec", 9)
    with pytest.raises(ValueError, match="no parameter lr"):
        walk(project, "made.top", "begin", "lr", 9)


def test_functions_words_and_sections_are_counted(tmp_path):
    root = write(tmp_path, READ)
    files, reading = house.source_files(root, ["made"]), house.read_sources(root, ["made"])
    # plain 2, with_args 4, without 3, inner 1, method 1, method 1 body lines
    assert (reading.functions, reading.short_functions) == (6, 5)
    # Say what is read what not | Add | Add three numbers Args a a number
    assert (reading.docstrings, reading.words.total()) == (3, 6 + 1 + 7)
    assert reading.per_thousand("what") == pytest.approx(1000 * 2 / 14)
    # with_args and without; not `inner`, not the hidden class's method, not those of two parameters
    assert (reading.wide_functions, reading.wide_with_args, reading.wide_inherited) == (2, 1, 0)
    assert house.count_lines(files) == textwrap.dedent(READ["words.py"]).lstrip().count("\n")


def test_an_override_inherits_the_section_of_a_documented_method(tmp_path):
    root = write(tmp_path, OVERRIDES)
    reading = house.read_sources(root, ["made"])
    # with a section: Base.documented; inherited: Middle's and Far's; neither: the three bare ones, `own` of Far, and
    # Says.documented, whose docstring replaces the inherited one
    assert (reading.wide_functions, reading.wide_with_args, reading.wide_inherited) == (8, 1, 2)


def test_the_chain_begins_at_main_and_files_are_counted_between_steps(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(write(tmp_path, RUN)))
    (tmp_path / "run.py").write_text(
        textwrap.dedent(
            """
            import sys

            def traced(recorder):
                sys.setprofile(recorder.record_call)
                try:
                    from made import entry
                    entry.main(6, recorder.record_step)
                finally:
                    sys.setprofile(None)
            """
        )
    )
    from run import traced  # type: ignore[import-not-found]

    recorder = Recorder([str(tmp_path / "made")])
    traced(recorder)
    counts = recorder.counts()
    assert counts["chain"] == ["entry.main", "entry.run", "words.train"]
    assert (counts["frames"], counts["frame_files"]) == (3, 2)
    # the package, entry and words; a step resumes `train` in words and goes through the comprehension of entry
    assert (counts["before"], counts["step"]) == (3, 1)


def test_the_table_of_a_made_up_checkout(tmp_path):
    for package in (*house.PACKAGES, "tests"):
        (tmp_path / package).mkdir()
    (tmp_path / "stability" / "sweep.py").write_text(
        "from sweeps.launch import run\n\ndef _sweep(spec):\n    return run(spec), spec\n\n"
        "def _run(plan):\n    return run(plan)\n"
    )
    (tmp_path / "sweeps" / "launch.py").write_text("def run(spec):\n    return spec\n")
    (tmp_path / "tests" / "test_all.py").write_text("\n\n\n")
    counts = {"frames": 5, "frame_files": 4, "step": 3, "before": 2}
    rows = {row.name: row.value for row in [*house.static_rows(tmp_path), *house.run_rows(counts)]}
    assert rows == {
        "source files / lines": "2 / 9",
        "test lines": "3",
        "spec: moves / climbs in 3 events": "2 / 1",
        "spec: rooms in them": "2",
        "plan: moves / climbs in 2 events": "1 / 0",
        "analysis lines / files": "0 / 0",
        "functions of ≤ 3 body lines": "100.0 % of 3",
        "in 1,000 words of docstrings": "what 0.0, which 0.0, where 0.0",
        "docstrings / their words": "0 / 0",
        "public functions of ≥ 3 parameters with Args:": "0 + 0 inherited of 0",
        "frames / files from main to optimizer.step, serial": "5 / 4",
        "files entered in one step / before the first": "3 / 2",
    }
