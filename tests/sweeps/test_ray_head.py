"""Ray on this machine: begun early, taken over or killed, without processes that nobody needs."""

import importlib.util
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from stability.cli.compose import compose_values
from stability.cli.words import Invocation
from stability.config.sweep import SweepSpec
from stability.runs.study import StudyFolder
from stability.sweep import ray_begun_early
from sweeps.launchers import Interrupt
from sweeps.launchers.ray import cluster as ray_cluster
from sweeps.launchers.ray import head as ray_head
from sweeps.launchers.ray import launcher as ray_launcher
from sweeps.launchers.ray.private import join_private, make_access, require_loopback
from sweeps.reaper import session
from tests.reading import replaced
from tests.sweeps import fakes

# not by importing it: Ray reads the environment when it is imported
pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


def commands(scratch):
    """Arguments of the processes of a session."""
    return [
        (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        for pid in session(str(scratch), frozenset([os.getpid()]))
    ]


def test_a_cluster_takes_over_the_ray_that_was_begun_early_and_ends_it():
    with ray_head.start_early(1):
        begun = ray_head._early[0]
        with ray_cluster.cluster() as scratch:
            assert scratch == begun.scratch
            assert scratch.stat().st_mode & 0o777 == 0o700  # Ray opens the folder that it is given to everybody
            running = commands(scratch)
            assert any("raylet/raylet" in command for command in running)
            for bystander in ("autoscaler/_private/monitor.py", "dashboard/dashboard.py", "log_monitor.py"):
                assert not any(bystander in command for command in running)
        assert begun.process.poll() is not None
        assert not scratch.exists()
    assert commands(scratch) == []


@pytest.mark.slow  # that a cluster's processes and folder are gone after it is in the test above
def test_ray_that_was_begun_for_nothing_leaves_nothing_behind():
    with ray_head.start_early(1):
        begun = ray_head._early[0]
        assert begun.address
        assert commands(begun.scratch)
    assert commands(begun.scratch) == []
    assert not begun.scratch.exists()


def test_ray_of_other_threads_or_cpus_is_not_taken_over():
    with ray_head.start_early(1):
        begun = ray_head._early[0]
        with ray_head.start_head(2) as other, ray_head.start_head(1, num_cpus=1) as third:
            assert len({begun.scratch, other.scratch, third.scratch}) == 3


def test_a_ray_that_does_not_start_is_told_in_a_line(monkeypatch):
    monkeypatch.setattr(ray_head, "ALL_CPUS", "many")
    with (
        ray_head.start_head(1) as found,
        pytest.raises(
            RuntimeError, match=r"^Ray does not start on this machine \(ValueError: .*'many'\); try launcher=serial$"
        ),
    ):
        found.address  # noqa: B018 asking is what fails


def test_a_ray_that_is_killed_is_told_with_its_signal():
    with ray_head.start_head(1) as killed:
        killed.process.send_signal(signal.SIGKILL)
        with pytest.raises(
            RuntimeError, match=r"^Ray does not start on this machine \(signal 9\); try launcher=serial$"
        ):
            killed.address  # noqa: B018
        with pytest.raises(
            RuntimeError,
            match=r"^Ray on this machine was ended from outside \(signal 9\); the same command goes on where this one stopped$",
        ):
            killed.require()


def test_what_ray_reads_of_the_environment_is_the_users_again_after_a_sweep(monkeypatch):
    fakes.imported("ray")
    from ray._private import ray_constants
    from ray._raylet import AuthenticationMode, get_authentication_mode

    with join_private(make_access()):
        assert get_authentication_mode() == AuthenticationMode.TOKEN
        assert not ray_constants.ENABLE_RAY_CLUSTER
    assert get_authentication_mode() != AuthenticationMode.TOKEN
    assert ray_constants.ENABLE_RAY_CLUSTER


@pytest.mark.parametrize("length", [4, 14, 15, 25, 60])
def test_rays_sockets_have_paths_that_every_system_takes(monkeypatch, length):
    monkeypatch.setattr(ray_head.tempfile, "gettempdir", lambda: "/" + (length - 1) * "a")
    folder = ray_head._short_temporary_folder() or ray_head.tempfile.gettempdir()
    made = f"{folder}/stability-ray-abcdefgh/r/session_2026-11-25_23-48-46_123456_4194304/sockets/plasma_store"
    assert len(made) <= 103


def test_a_ray_that_other_machines_reach_is_refused():
    for address in ("127.0.0.1:41519", "[::1]:41519"):
        require_loopback(address)
    with pytest.raises(RuntimeError, match=r"^this version of Ray listens at 192\.0\.2\.2:41519, where other machines"):
        require_loopback("192.0.2.2:41519")


@pytest.mark.slow
def test_a_sweep_whose_ray_is_killed_ends_with_a_word_and_goes_on_later(tmp_path):
    trials = [fakes.make_trial(tmp_path, index, steps=300) for index in range(2)]

    def kill_once():
        if (
            all(trial.directory.metrics_file.exists() for trial in trials)
            and (found := ray_cluster._session.head).process.poll() is None
        ):
            found.process.send_signal(signal.SIGKILL)
            found.process.wait()

    folder = tmp_path / "studies/study/ray"
    with Interrupt() as interrupt, pytest.raises(RuntimeError, match="was ended from outside"):
        ray_launcher.launch(trials, on_tick=kill_once, interrupt=interrupt, run=fakes.run_slowly, folder=folder)
    assert not ray_cluster._session
    while any(trial.lock.owner() for trial in trials):
        time.sleep(0.1)
    with Interrupt() as interrupt:
        ray_launcher.launch(trials, on_tick=lambda: None, interrupt=interrupt, run=fakes.run_fake, folder=folder)
    assert [trial.directory.status()["state"] for trial in trials] == ["stable"] * 2


WORDS = ["data=text", f"data.path={__file__}", "mechanism=sa", "lr=[1e-3]", "name=begun"]


@pytest.mark.parametrize(
    ("words", "state", "is_begun"),
    [
        (["launcher=ray"], None, True),
        (["launcher=ray"], "running", True),
        (["launcher=ray"], "stable", False),
        (["launcher=ray", "dry_run=true"], None, False),
        (["launcher=ray", "ray.address=127.0.0.1:6379"], None, False),
        (["launcher=serial"], None, False),
        ([], None, True),  # auto; two seeds
        (["seeds=1"], None, False),
        (["seeds=1", "precision=[float32,bf16]"], None, True),
        (["seeds=1", "mechanism=[sa,sc]"], None, True),
        (["seeds=1", "steps=[20,40]"], None, True),
        (["seeds=1", "ablate.sa.temperature=[fixed,learned]"], None, True),
        (["seeds=1", "lr=edge"], None, True),
        (["seeds=1", "lr=range", "lr.num=1"], None, False),
        (["seeds=1", "ray.hang_s=60"], None, True),
        (["seeds=1", "gpus_per_trial=0"], None, True),
        (["seeds=1", "search=asha", "lr=range"], None, True),
        ([], "running", True),
        ([], "stable and running", False),  # one of two is left
        (["seeds=3"], "stable and running", True),
        (["lr=edge"], "running", True),
        (["launcher=ray", "data.path=nowhere.txt"], None, False),  # which ends the sweep at once
    ],
)
def test_a_sweep_begins_ray_early_only_where_something_may_be_left_to_train_here(
    tmp_path, monkeypatch, words, state, is_begun
):
    if state is not None:
        study = StudyFolder.of(tmp_path, "begun")
        states = state.split(" and ")
        study.write([f"0123456789a{place}" for place in range(len(states))])
        for run, its in zip(study.runs(), states, strict=True):
            run.set_status(its, step=1, num_steps=1)
    begun = []
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(ray_head, "_start", lambda *arguments: begun.append(arguments) or ExitStack())
    with ray_begun_early(compose_values(SweepSpec, Invocation.of(replaced([*WORDS, f"runs_dir={tmp_path}"], *words)))):
        pass
    assert begun == ([(1, None)] if is_begun else [])
