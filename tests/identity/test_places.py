"""Paths on the command line arrive as they were written, whatever is in them; nothing else is touched."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from stability.cli.compose import study_name
from stability.cli.places import count_places
from stability.cli.words import Invocation
from stability.config.identity import run_id
from tests.reading import compose, read_spec

ROOT = Path(__file__).resolve().parents[2]
PROTEIN = ["data=protein", "objective=multitrack", "cross=auto", "objective.sources=[sequence]"]
GPT2 = ["data=text", "data.path=x", "data.tokenizer=gpt2"]
OWN = "tests.identity.plugins.own_files"
WEIGHTS = "tests.identity.plugins.with_weights"
PATHS = [
    "/F/a(b),c/x.tsv",
    "a(b),c.tsv",
    "wide space/x=y",
    "it's/here",
    "[z].txt",
    "{q}:r/s",
    "back\\slash(1)/x",
    "2024",
    "true",
    "./null",
    "-1e3",
    "a=b,c=d",
]


WORST = "/F/a(b),c = 'd' {e}/[x].tsv"


def overrides(word: str) -> list[str]:
    """What Hydra gets for a word."""
    return [str(override) for override in Invocation.of([word]).overrides]


def read_by_hydra(word: str) -> Any:
    """The value of an override as Hydra's own parser understands it."""
    (override,) = overrides(word)
    return OverridesParser.create().parse_override(override).value()


@pytest.mark.parametrize("path", [*PATHS, WORST])
@pytest.mark.parametrize(
    "key",
    [
        "data.annotations",
        "data.path",
        "data.ranks",
        "data.dataset",
        "runs_dir",
        "reports_dir",
        "ckpt",
        "hf",
        "oracle",
        "name",
    ],
)
def test_hydra_reads_a_path_as_it_was_written(key, path):
    assert read_by_hydra(f"{key}={path}") == path


@pytest.mark.parametrize("path", [path for path in PATHS if "/" in path and "\\" not in path])
def test_hydra_reads_so_a_path_in_a_field_that_says_nothing(path):
    assert read_by_hydra(f"data.unmarked={path}") == path


@pytest.mark.parametrize(
    ("words", "key", "read"),
    [
        (PROTEIN, "data.annotations", lambda spec: spec.data.settings.annotations),
        (GPT2, "data.ranks", lambda spec: spec.data.settings.ranks),
        (["data=hf"], "data.dataset", lambda spec: spec.data.settings.dataset),
        ([f"plugins=[{OWN}]", "data=own_files"], "data.folder", lambda spec: spec.data.settings.folder),
        ([f"plugins=[{OWN}]", "data=own_files"], "data.unmarked", lambda spec: spec.data.settings.unmarked),
        (
            [f"plugins=[{WEIGHTS}]", "mechanism=with_weights"],
            "mechanism.with_weights.start",
            lambda spec: spec.mechanism[0].settings.start,
        ),
    ],
)
def test_a_path_in_a_sweeps_field_arrives_whole(words, key, read):
    assert read(read_spec("sweep", [*words, f"{key}={WORST}"])) == WORST


def test_a_path_without_a_slash_in_a_plugins_field_arrives_whole():
    assert (
        read_spec("sweep", [f"plugins=[{OWN}]", "data=own_files", "data.folder=a(b),c"]).data.settings.folder
        == "a(b),c"
    )


@pytest.mark.parametrize(
    ("kind", "words", "key"),
    [("generate", ["num=1"], "ckpt"), ("probe", ["what=spectra"], "ckpt"), ("status", [], "name")],
)
def test_a_path_in_another_entrys_field_arrives_whole(kind, words, key):
    assert getattr(read_spec(kind, [*words, f"{key}={WORST}"]), key) == WORST


@pytest.mark.parametrize(
    ("written", "tables"),
    [
        ("[a/b (1).tsv,c(d)/e]", ("a/b (1).tsv", "c(d)/e")),
        ("[ x.tsv , 2024]", ("x.tsv", "2024")),
        ("['a,b/c',d/e]", ("a,b/c", "d/e")),
        ("[]", ()),
    ],
)
def test_each_path_of_a_list_arrives_whole(written, tables):
    assert (
        read_spec("sweep", [f"plugins=[{OWN}]", "data=own_files", f"data.tables={written}"]).data.settings.tables
        == tables
    )


def test_a_plugins_marked_paths_are_in_no_id():
    def spec(*words):
        return read_spec(
            "sweep", [f"plugins=[{OWN}]", "data=own_files", "mechanism=sa", "lr=1e-3", "seeds=1", *words]
        ).expand("f" * 64)[0]

    plain = run_id(spec())
    assert run_id(spec("data.folder=/a(b)/c", "data.tables=[x/y]")) == plain
    assert run_id(spec("data.number=4")) != plain


def test_null_takes_a_path_away_again():
    assert read_spec("sweep", ["study=dna_mini", "data.path=null"]).data.settings.path is None
    assert read_spec("sweep", ["study=text_54m", "generate.num=null", "generate.oracle=null"]).generate is None


@pytest.mark.parametrize(
    "word",
    [
        "steps=4",
        "lr.num=9",
        "hessian=false",
        "mechanism=[sa,sc]",
        "data=text",
        "data=a/b",
        "study=a/b",
        "data.max_documents=100",
        "data.tokenizer=gpt2",
        "data.path='a b/c'",
        'data.path="a b/c"',
        "data.path=null",
        "plugins=[a.b,c.d]",
        "slurm.setup=['module load cuda/12']",
        "slurm.setup=[source x/y]",
        "data.revision=refs\\,x/y",
        "model.width=32",
        "search.num=4",
    ],
)
def test_nothing_else_is_touched(word):
    assert overrides(word) == [word]


@pytest.mark.parametrize("word", ["ablate.sc.window=[2,4]", "search.space.lr_peak={low:1e-4,high:1e-1}"])
def test_keys_of_parts_are_added_as_they_are(word):
    assert overrides(word) == [f"++{word}"]


def test_which_keys_hold_places():
    assert {
        key for key in ("data.path", "data.ranks", "data.dataset", "data.annotations") if count_places(key) == "one"
    } == {
        "data.path",
        "data.ranks",
        "data.dataset",
        "data.annotations",
    }
    for key in ("runs_dir", "reports_dir", "ckpt", "hf", "oracle", "generate.oracle", "name"):
        assert count_places(key), key
    for key in (
        "data",
        "data.keep",
        "data.split",
        "model.name",
        "mechanism.sc.window",
        "steps",
        "generate.num",
        "data.path.x",
        "nothing",
    ):
        assert count_places(key) is None, key


def test_an_added_key_is_quoted_too():
    assert overrides("++data.path=a(b)") == ["++data.path='a(b)'"]
    assert compose("sweep", ["++data.path=/a(b)"])["data"]["path"] == "/a(b)"


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["data=text", "data.path=/home/me/my book (2).txt"], "text-mybook2"),
        (["data=text", "data.path=book.txt"], "text-book"),
        (["data=protein", "data.annotations=/F/a(b),c/x.tsv"], "protein-x"),
        (["data=hf", "data.dataset=a/b", "data.revision=refs/convert/parquet"], "hf-b"),
        (["generate.num=3", "generate.oracle=hf:gpt2-large"], "generate.num3-hfgpt2-large"),
    ],
)
def test_a_sweep_is_named_after_the_last_part_of_a_path(argv, name):
    assert re.fullmatch(re.escape(name) + "-[0-9a-f]{6}", study_name(Invocation.of(argv)))


def test_a_command_line_without_numbers_for_the_data_is_read_without_torch():
    words = ["data=text", "data.path=/a(b)/c", "data.field=body", "data.tokenizer=gpt2", "runs_dir=x(1)"]
    code = f"import sys; from tests.reading import compose; compose('sweep', {words!r}); print('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
        ).stdout.strip()
        == "False"
    )
