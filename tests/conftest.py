"""Small real runs that the tests share: a model of two layers on a page of text, in a temporary pool."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, ListConfig, Node, OmegaConf, UnionNode
from omegaconf.base import Box

from stability import registry
from stability.cli.entry import run_entry
from stability.config.base import validate
from stability.config.identity import run_id
from stability.config.run import RunSpec
from stability.corpora.cache import prepare
from stability.runs import provenance
from stability.runs.directory import RunDirectory
from stability.startup import SELDOM, end_at_once

# a shell's background job starts with Ctrl-C ignored, and tests of it would wait for ever
signal.signal(signal.SIGINT, signal.default_int_handler)
# side by side (-n): all threads of all tests are no more than the cores
if "OMP_NUM_THREADS" not in os.environ and "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    threads = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for the processes that tests start
    torch.set_num_threads(threads)
# kernels run in Triton's interpreter where there is no GPU; it is chosen when Triton is first imported, by whomever
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # each seed is also left, with the stack of the call as text, for accelerators that may start later: a millisecond
    torch.random._manual_seed_impl = lambda seed: torch.default_generator.manual_seed(int(seed))
# OmegaConf parses YAML in Python, for a fifth of the time of reading a command line; libyaml gives the same
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# a command line reads thirty files of conf/, most of them twice, and the tests read hundreds of command lines: each file
# is parsed once, and everyone gets a copy
_load, _loaded = OmegaConf.load, {}


def _load_once(file: Any) -> Any:
    path = Path(file if isinstance(file, str | Path) else file.name)
    stat = path.stat()
    key = (path.resolve(), stat.st_ino, stat.st_mtime_ns, stat.st_size)
    if key not in _loaded:
        _loaded[key] = pickle.dumps(_load(file))  # which makes a copy in a fifth of the time of copy.deepcopy
    return pickle.loads(_loaded[key])


OmegaConf.load = _load_once  # type: ignore[method-assign]
# for each yaml Hydra collects what all groups have chosen, in case a default names another's choice by ${…}: a fifth of
# the time of reading a command line, and no yaml of ours does
_choices = defaults_list._create_interpolation_map


def _choices_where_asked(overrides: Any, defaults: Any, self_added: bool) -> Any:
    is_asked = any(not each.is_self() and each.is_interpolation() for each in defaults)
    return _choices(overrides, defaults, self_added) if is_asked else None


defaults_list._create_interpolation_map = _choices_where_asked
# Hydra merges the yamls that a command line chooses one by one, for half the time of reading it; most command lines
# choose what an earlier one chose, and the same parts make the same whole
_merge, _merged = ConfigLoaderImpl._compose_config_from_defaults_list, {}


def _merge_once(self: ConfigLoaderImpl, defaults: Any, repo: Any) -> Any:
    parts = [(default, repo.load_config(default.config_path)) for default in defaults]
    key = repr([(default, part.header, part.config) for default, part in parts])
    if key not in _merged:
        _merged[key] = pickle.dumps(_merge(self, defaults, repo))
    return pickle.loads(_merged[key])


ConfigLoaderImpl._compose_config_from_defaults_list = _merge_once  # type: ignore[method-assign]


# after each merge OmegaConf tells every value of the whole its parent once more, and imports two modules for each: a
# fifth of the time of reading a command line; nearly all know theirs
def _re_parent_where_new(self: Any) -> None:
    content = self.__dict__["_content"]
    values = content.values() if isinstance(content, dict) else content if isinstance(content, list) else (content,)
    for value in values:
        if isinstance(value, Node):
            if value.__dict__["_parent"] is not self:
                value._set_parent(self)
            if type(value) in (DictConfig, ListConfig, UnionNode):
                _re_parent_where_new(value)


Box._re_parent = _re_parent_where_new  # type: ignore[method-assign]

SENTENCE = "the window of a stable step is wide where the graph is smooth and narrow where the scores are sharp"


# the groups of Hydra's that plugins are stored in
PLUGGED = ("mechanism", "cross", "residual", "optimizer", "objective", "data")


# What a run of a second consists of beside its data and objective.
TINY: dict[str, Any] = {
    "model": {"name": "tiny", "layers": 2, "width": 16, "heads": 2, "positions": 16},
    "schedule": {"name": "constant"},
    "steps": 12,
    "batch": 4,
    "clip_norm": 1.0,
    "evaluation": {"every_steps": 4, "sequences": 8},
    "mechanism": {"name": "sa"},
    "residual": {"name": "identity"},
    "optimizer": {"name": "adamw"},
    "norm": "layernorm",
    "lr_peak": 1e-3,
    "seed": 0,
}


def pytest_collection() -> None:
    """What collecting makes stays to the end: looking through it for garbage again and again takes a fifth of the
    time."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    gc.set_threshold(*SELDOM)


def pytest_unconfigure() -> None:
    """Say nothing more where Triton was loaded, as the entries do."""
    atexit.register(end_at_once)


def _checked_only(descriptor: int) -> None:
    os.fstat(descriptor)  # of a closed file an error, as that of fsync


@pytest.fixture(autouse=True, scope="session")
def nothing_waits_for_the_disk():
    """A file that is synced survives the loss of power, which no test can see; a run of eight steps waits a third of
    its time for that. A process that is killed loses nothing that it has written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", _checked_only)
        yield


@pytest.fixture(autouse=True, scope="session")
def git_is_asked_once():
    """Every run writes down its commit, for which git is started three times; of this checkout once is enough."""
    asked, here = provenance._commit, provenance.__file__
    of_here = functools.cache(asked)

    def commit() -> dict[str, Any]:
        return dict(of_here()) if provenance.__file__ == here else asked()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "_commit", commit)
        yield


@pytest.fixture(autouse=True)
def plugins_of_a_test_alone(monkeypatch):
    """What a test registers is known to it alone: no test depends on which came before."""
    stored = ConfigStore.instance().repo
    before = {group: dict(stored.get(group, {})) for group in PLUGGED}
    monkeypatch.setattr(registry, "_plugins", dict(registry._plugins))
    yield
    for group, names in before.items():
        stored[group] = names


class Lab:
    """A pool of runs in a temporary folder, with the text that its runs read."""

    def __init__(self, folder: Path):
        self.pool = folder / "runs"
        self.cache = self.pool / "cache"
        self.text = folder / "page.txt"
        words = SENTENCE.split()
        lines = [" ".join(words[(7 * i + j * j) % len(words)] for j in range(12)) for i in range(900)]
        self.text.write_text("\n".join(lines))

    def spec(self, **changes: Any) -> RunSpec:
        values: dict[str, Any] = {
            **TINY,
            "objective": {"name": "mlm"},
            "data": {"name": "text", "path": str(self.text)},
        }
        values |= changes
        fingerprint = prepare(validate(RunSpec, {**values, "data_fingerprint": "unknown"}).data, self.cache).fingerprint
        return validate(RunSpec, {**values, "data_fingerprint": fingerprint})

    def directory(self, spec: RunSpec) -> RunDirectory:
        return RunDirectory(self.pool, run_id(spec))

    def replica(self, spec: RunSpec, devices: Any = None) -> Any:
        """Return what takes the steps of a run, without a folder of it."""
        import torch

        from stability.corpora.cache import load
        from stability.training.step import Replica

        return Replica(spec, load(self.cache, spec.data_fingerprint), torch.device("cpu"), devices)

    def train(self, spec: RunSpec, steps: int | None = None, device: str = "cpu") -> RunDirectory:
        """Run to the end, or leave after ``steps`` steps as an interrupted launcher does."""
        from stability.training.run import train

        directory = self.directory(spec)
        generator = train(spec, directory, cache_dir=self.cache, device=device)
        for number, _ in enumerate(generator, 1):
            if number == steps:
                generator.close()
                break
        return directory


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture
def small_sweep(lab: Lab, tmp_path: Path) -> list[str]:
    """The words that sweeps of runs of a second share; mechanisms, rates and a name come beside them."""
    words = """
        data=text objective=mlm launcher=serial device=cpu steps=6 batch=4 evaluation.every_steps=3 evaluation.sequences=8
        model.layers=2 model.width=16 model.heads=2 model.positions=16
    """
    return [*words.split(), f"data.path={lab.text}", f"runs_dir={lab.pool}", f"reports_dir={tmp_path / 'reports'}"]


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run an entry in this process as ``python -m`` does in its own: exit code, stdout, stderr. Importing torch anew
    takes longer than all that a refusal does; what a process of its own says is tested in `test_command_line`."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers of the tests' own process stay
    monkeypatch.setattr(atexit, "register", lambda *_: None)

    def enter(module: str, *argv: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", [module, *argv])
        entry = importlib.import_module(module)
        with pytest.raises(SystemExit) as stop:
            run_entry(entry.main, module.rpartition(".")[2], entry.HELP)
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(argv, stop.value.code, printed.out, printed.err)

    return enter
