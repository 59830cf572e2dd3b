"""What the layout promises and no other test sees: torch-free modules, third parties in their homes, configs that
compose."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest

from stability.cli.conf import FAMILY_OF, choices, yamls
from stability.cli.words import CHOICES
from stability.config.base import AXES
from stability.config.parse import parse
from stability.config.sweep import SweepSpec
from stability.registry import Registry
from tests.reading import compose, read_spec

ROOT = Path(__file__).resolve().parents[1]
TORCH_FREE = [
    "stability.config",
    "stability.registry",
    "stability.runs.directory",
    "stability.runs.log",
    "stability.runs.results",
    "stability.runs.study",
    "stability.runs.provenance",
    "stability.runs.verdict",
    "stability.config.training",
    "stability.cli.entry",
    "stability.cli.compose",
    "stability.cli.publish",
    "stability.cli.subjects",
    "stability.__main__",
    "stability.sweep",
    "stability.hessian",
    "stability.probe",
    "stability.transfer",
    "stability.deploy",
    "stability.infer",
    "stability.describe",
    "stability.web.__main__",
    "stability.web.app",
    "stability.generate",
    "stability.embed",
    "stability.status",
    "analysis.report",
    "sweeps.search.edge",
]


def test_modules_import_neither_torch_nor_a_launcher():
    """All in one process, one after another: the first that a forbidden name comes with is named."""
    code = f"""
import importlib, sys
import stability.status, sweeps.view.study_view
if "pandas" in sys.modules:  # a third of the time in which `status` starts
    sys.exit("stability.status imports pandas")
for module in {TORCH_FREE}:
    importlib.import_module(module)
    if found := [name for name in ("torch", "ray", "wandb", "optuna") if name in sys.modules]:
        sys.exit(f"{{module}} imports {{found}}")
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (out.returncode, out.stderr) == (0, "")


def test_reading_a_sweep_imports_nothing_that_takes_seconds_beside_torch():
    code = """
import sys
from stability.cli.compose import read
from stability.cli.words import Invocation
from stability.config.sweep import SweepSpec
read(SweepSpec, Invocation.of(["mechanism=[sa,sc,mix]", "data=synthetic_pairs", "objective=sentence_pairs"]))
names = ("scipy.stats", "sklearn", "pandas", "ray", "wandb", "transformers", "sentence_transformers", "matplotlib")
if found := [name for name in names if name in sys.modules]:
    sys.exit(f"reading a sweep imports {found}")
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (out.returncode, out.stderr) == (0, "")


ALLOWED = {
    "stability/curvature": {"torch", "stability.curvature"},
    "kernels": {"kernels", "torch", "triton"},
}
# what joins curvature to other people's training loops, which are imported when an adapter is asked for
ADAPTERS = {"transformers", "lightning"}


def test_the_package_that_holds_curvature_imports_nothing_but_pythons_own():
    assert all(name.split(".")[0] in sys.stdlib_module_names for name in imported(ROOT / "stability" / "__init__.py"))


@pytest.mark.parametrize("folder", ALLOWED)
def test_what_stands_alone_imports_only_what_it_may(folder):
    """An allow-list, in functions too: import-linter has none, and a list of what is forbidden forgets the next
    package."""
    allowed = ALLOWED[folder] | (ADAPTERS if folder == "stability/curvature" else set())
    for file in sorted((ROOT / folder).rglob("*.py")):
        for name in imported(file):
            assert name.split(".")[0] in sys.stdlib_module_names or any(
                name == each or name.startswith(f"{each}.") for each in allowed
            ), f"{file} imports {name}"


def imported(file):
    """The modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, f"{file} imports relatively"
            yield node.module


def untyped(source):
    """The functions of a source that leave out what an argument or the result is, or say ``Any`` of it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            listed = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            said = [node.returns, *(argument.annotation for argument in listed if argument is not None)]
            if any(annotation is None or ast.unparse(annotation) == "Any" for annotation in said):
                yield node.name


def test_every_function_of_an_entry_says_what_it_takes_and_gives():
    files = [*(ROOT / "stability").glob("*.py"), *(ROOT / "stability" / "web").glob("*.py")]
    entries = [file for file in files if "run_entry(main, " in file.read_text()]
    assert len(entries) == 15  # one checks a command line for the web page
    assert {file.name: list(untyped(file.read_text())) for file in entries} == {file.name: [] for file in entries}
    faulty = (
        "def a(x) -> int: ...\ndef b(x: int, *, y=1) -> int: ...\ndef c(x: Any) -> int: ...\ndef d(): ...\ndef "
        "e(*x, **y) -> None: ..."
    )
    assert list(untyped(faulty)) == ["a", "b", "c", "d", "e"]


def test_every_package_is_installed_with_the_others():
    """The list in pyproject.toml, from which a wheel is built: a folder that it forgets is missing for everyone but
    us."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for name in ("stability", "sweeps", "analysis", "kernels")
        for file in (ROOT / name).rglob("__init__.py")
    }
    assert set(listed) == found | {"stability.conf"}


def test_kernels_package_is_empty():
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""


def test_a_yaml_is_a_preset():
    """What a part or a class of settings is by default stands in its class alone."""
    generated = {*FAMILY_OF, "schedule", "search", "curvature"}
    assert {folder.name for folder in (ROOT / "conf").iterdir() if folder.is_dir()} & generated == set()


@cache
def read(*words):
    """The sweep of a command line; each is read once for all tests of this file."""
    return parse(SweepSpec, {**compose("sweep", words), "name": "x"})


def all_of(axis, names):
    """The word that chooses all of an axis at once, as a sweep may: a command line takes a tenth of a second."""
    return f"{axis}=[{','.join(sorted(names))}]"


BESIDE_ALL = {"parametrization": ["model.width=[32,64]", "model.head_width=16"]}  # by axis: what all its choices need


def test_a_choice_has_the_defaults_of_its_config():
    """A part built in Python and the same part chosen on the command line are the same part."""
    for group, family in AXES.items():
        # those that are not to be trained are of no sweep: tests/config/test_trainable.py
        names = Registry(family).names(**({"cross": False, "trainable": True} if family == "mechanisms" else {}))
        found = [part.settings for part in getattr(read(all_of(group, names), *BESIDE_ALL.get(group, ())), group)]
        assert found == [Registry(family).load(name).Config() for name in names], group
    for family, group in (("ffns", "ffn"), ("positions", "position"), ("linears", "linear")):
        for name in Registry(family).names():
            found = getattr(read(f"{group}={name}"), group)
            assert found.settings == Registry(family).load(name).Config(), (group, name)
    for name in Registry("mechanisms").names(cross=True):
        assert read(f"cross={name}").cross.settings == Registry("mechanisms").load(name).Config(), name


TABLE_10 = {
    "text_54m": (6, 6, 384, 1024),
    "text_193m": (12, 12, 768, 1024),
    "text_385m": (32, 16, 1024, 1024),
    "dna_51m": (6, 6, 384, 1024),
    "dna_172m": (12, 12, 768, 1024),
    "dna_331m": (32, 16, 1024, 1024),
    "protein_35m": (12, 4, 256, 2048),
    "protein_133m": (24, 8, 512, 2048),
    "protein_320m": (32, 16, 768, 2048),
}


@pytest.mark.parametrize("name", TABLE_10)
def test_model_sizes_are_those_of_table_10(name):
    model = read(f"model={name}").model
    assert (model.layers, model.heads, model.width, model.positions) == TABLE_10[name]


TABLE_11 = {
    "paper_small": (1e-5, 5e-5, 1e-4, 5e-4, 7.5e-4, 1e-3, 2.5e-3, 5e-3),
    "paper_medium": (1e-5, 5e-5, 7.5e-5, 1e-4, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 2.5e-3),
    "paper_large": (7.5e-5, 1e-4, 2.5e-4, 5e-4),
    "paper_text_385m": (1e-5, 5e-5, 7.5e-5, 1e-4, 2.5e-4, 5e-4, 7.5e-4, 1e-3),
    "paper_text_385m_mix": (7.5e-5, 1e-4, 2.5e-4, 5e-4),
}


@pytest.mark.parametrize("name", TABLE_11)
def test_learning_rates_are_those_of_table_11(name):
    assert read(f"lr={name}").lr.rates() == TABLE_11[name]


# choices that stand alone: what a command line must say beside them
BESIDE = {
    "text": ["data.path=README.md"],
    "text_mini": ["data.path=README.md"],
    "text_bytes": ["data.path=README.md"],
    "attentionx_gpt_mini": ["data.path=README.md"],
    "hf": ["data.dataset=a/b"],
    "values": ["lr.values=[1e-3]"],
    "ar": ["mechanism=sa"],
    "classify": ["data=images"],
    "images": ["objective=classify"],
    "recall": ["data=mqar", "mechanism=sa"],
    "mqar": ["objective=recall", "mechanism=sa"],
    "copy": ["objective=recall", "mechanism=sa"],
    "multitrack": ["data=protein", "cross=auto", "objective.sources=[sequence]"],
    "protein_readings": ["objective.tokenizer=0123456789ab"],
    "protein": ["objective=multitrack", "cross=auto", "objective.sources=[sequence]"],
    "sentence_pairs": ["data=synthetic_pairs"],
    "pairs": ["objective=sentence_pairs", "data.path=README.md"],
    "stdlib_pairs": ["objective=sentence_pairs", "objective.loss=mnrl"],
    "synthetic_pairs": ["objective=sentence_pairs"],
}


def test_every_choice_of_every_group_composes_and_parses():
    """But for those that are read by the tests above, and the presets of `tests/identity/golden` by those beside it.
    The first choices of all groups are read as one command line, then the second ones, and so on."""
    golden = json.loads((ROOT / "tests/identity/golden/presets.json").read_text())
    elsewhere = {"study": golden, "model": TABLE_10, "lr": TABLE_11}
    side_by_side = []
    assert [read_spec("train_tokenizer", [f"size={choice}"]) for choice in yamls("size")]
    for group in sorted(CHOICES + ("study",)):
        if group in AXES:
            trainable = {"trainable": True} if group == "mechanism" else {}  # the others: of no sweep
            names = set(choices(group)) & set(Registry(AXES[group]).names(**trainable))
            read(all_of(group, names), *BESIDE_ALL.get(group, ()))
        else:
            left = [choice for choice in choices(group) if choice not in elsewhere.get(group, ())]
            alone = [choice for choice in left if choice in BESIDE or group in ("study", "search")]
            for choice in alone:
                tokenizer = ["objective.tokenizer=0123456789ab"] if choice.startswith("protein_") else []
                read(f"{group}={choice}", *BESIDE.get(choice, tokenizer))
            side_by_side.append([f"{group}={choice}" for choice in left if choice not in alone])
    for words in zip_longest(*side_by_side):
        read(*filter(None, words))
