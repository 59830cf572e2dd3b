"""What is refused before a sweep says what it trains and writes its study: a Ray cluster that is not there, a machine
that is too small."""

import io
import os
import socket

import pytest
import torch
from rich.console import Console

from stability.runs.study import StudyFolder
from sweeps import launch
from sweeps.launchers.ray import address as ray_address
from sweeps.record import StudyRecord
from tests.sweeps import fakes
from tests.sweeps.real import make_sweep
from tests.sweeps.searching import Sweep


def refused(folder, *words):
    """The error of a grid on Ray, of which nothing was printed or put on record."""
    spec, _ = make_sweep(folder, "launcher=ray", *words)
    console, record, trial = Console(file=io.StringIO()), record_of(spec), fakes.make_trial(folder)
    with pytest.raises(RuntimeError) as caught:
        launch.run(spec, [trial], record=record, console=console, run=fakes.run_fake)
    assert (console.file.getvalue(), record.study.file.exists(), trial.directory.spec_file.exists()) == (
        "",
        False,
        False,
    )
    return str(caught.value)


def record_of(spec):
    return StudyRecord(StudyFolder.of(spec.runs_dir, spec.name), spec, before={}, origin={}, started=0.0)


def unused_port():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return closed.getsockname()[1]


def test_a_cluster_that_is_not_there_is_told_in_a_line_before_anything_is_on_record(tmp_path, capfd):
    typed = f"127.0.0.1:{unused_port()}"
    told = refused(tmp_path, f"ray.address={typed}")
    assert told.startswith(f"ray.address={typed}: no Ray cluster that can be joined: nothing answers at ")
    assert told.endswith(" (Connection refused); start one with: ray start --head")
    assert capfd.readouterr() == ("", ""), "not a word of Ray's own"


def test_a_host_that_is_not_there_is_named():
    with pytest.raises(ConnectionError, match=r"^there is no host nowhere\.invalid$"):
        ray_address.connect("nowhere.invalid:6379")


def test_a_port_that_listens_is_looked_at_further():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ray_address.connect(f"127.0.0.1:{server.getsockname()[1]}")


def test_a_finished_sweep_needs_no_cluster(tmp_path):
    spec, _ = make_sweep(tmp_path, "launcher=ray", f"ray.address=127.0.0.1:{unused_port()}")
    trial, record = fakes.make_trial(tmp_path), record_of(spec)
    fakes.finish(trial.directory, "stable", step=4, val_nll=2.5)
    outcome = launch.run(spec, [trial], record=record, console=Console(file=io.StringIO()))
    assert (outcome.num_skipped, record.study.read()["run_ids"]) == (1, [trial.run_id])


def test_a_share_that_this_machine_does_not_have_is_told_before_anything_is_on_record(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert refused(tmp_path, "cpus_per_trial=99") == "cpus_per_trial=99, but there are 2 CPUs; give at most 2"
    assert (
        refused(tmp_path, "gpus_per_trial=1") == "gpus_per_trial=1, but there is no GPU; give gpus_per_trial=0 or auto"
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert refused(tmp_path, "gpus_per_trial=2") == "gpus_per_trial=2, but there is 1 GPU; give at most 1"


def test_a_search_is_refused_before_its_first_round_is_on_record(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    sweep = Sweep(tmp_path, "lr=edge", "launcher=ray", "cpus_per_trial=99")
    with pytest.raises(RuntimeError, match="cpus_per_trial=99, but there are 2 CPUs"):
        sweep.run()
    assert sweep.printed == "" and not sweep.study.file.exists()
