"""What becomes of runs whose worker or node dies, as the Tuner's loop tells it; no Ray is started."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from stability.runs.processes import Process
from sweeps.launchers import Interrupt, set_environment
from sweeps.launchers.ray import cluster as ray_cluster
from sweeps.launchers.ray.launcher import SETTINGS
from sweeps.launchers.ray.share import Share
from sweeps.launchers.ray.watch import Watch
from tests.sweeps import fakes

# as Ray words them
NODE = "The actor died unexpectedly before finishing this task.\n\tclass_name: RunTrainable\nThe actor died because its node has died. Node Id: 8a2f"
DRAINED = (
    "The actor died unexpectedly before finishing this task.\n\tthe actor's node was terminated expectedly: drained"
)
WORKER = "The actor died unexpectedly before finishing this task.\nWorker exit type: SYSTEM_ERROR Worker exit detail: End of file."
CREATION = "The actor died because of an error raised in its creation task, ray::RunTrainable.__init__() (pid=1)\nImportError: no sweeps here"

BLIND = "The actor died because of an error raised in its creation task, ray::RunTrainable.__init__() (pid=1)\nRuntimeError: the runs' folder is not there on node 8a2f"


class Loop:
    """A Tuner's loop over three runs of which the second loses its workers. ``said``: the lines for the user."""

    def __init__(self, folder, monkeypatch, node_retries=2, hang_s=None):
        self.module, self.said, self.folder, self.nodes = fakes.imported("sweeps.launchers.ray.board"), [], folder, [{}]
        monkeypatch.setattr(self.module, "list_living_nodes", lambda: [{"Resources": each} for each in self.nodes])
        monkeypatch.setattr(self.module, "LOOK_S", 0.0)
        self.trials = [fakes.make_trial(folder, index) for index in range(3)]
        job = fakes.imported("sweeps.launchers.ray.trainable").Job(
            {trial.run_id: trial for trial in self.trials}, fakes.run_fake, str(folder), Process.current()
        )
        self.board = self.module.Board(
            job,
            Share(1, 0),
            node_retries,
            hang_s,
            on_tick=lambda: None,
            settle=lambda: True,
            interrupt=Interrupt(),
            say=self.said.append,
        )

    def lose(self, account, *, is_last=False):
        """Tell that Tune has lost a worker of the second run, the last time or not."""
        file = self.folder / "error.txt"
        with file.open("a") as error:
            error.write(f"Failure # of many\n{account}\n")
        trial = SimpleNamespace(config={"run": {"id": self.trials[1].run_id}}, error_file=str(file), max_failures=2)
        (self.board.on_trial_error if is_last else self.board.on_trial_recover)(0, [], trial)
        return trial

    def step(self, status="PENDING"):
        config = {"run": {"id": self.trials[1].run_id}}
        self.board.on_step_begin(0, [SimpleNamespace(status=status, config=config)])

    def status(self):
        return self.trials[1].directory.status()


@pytest.fixture
def loop(tmp_path, monkeypatch):
    return lambda **how: Loop(tmp_path, monkeypatch, **how)


LABEL = "sa lr=0.01 seed=1 (000000000001)"


@pytest.mark.parametrize(
    ("account", "line"),
    [
        (NODE, f"a node died under {LABEL}, which goes on on another"),
        (DRAINED, f"a node died under {LABEL}, which goes on on another"),
        (WORKER, f"a worker process died under {LABEL}, which goes on in another"),
    ],
)
def test_a_run_whose_node_or_worker_dies_goes_on_and_is_not_failed(loop, account, line):
    one = loop()
    one.lose(account)
    one.lose(account)
    one.step()
    assert one.said == [line] * 2
    assert one.status()["state"] == "queued"


@pytest.mark.parametrize(
    ("account", "retries", "reason"),
    [
        (NODE, 2, "the node it ran on died, 3 times in all"),
        (NODE, 0, "the node it ran on died"),
        (WORKER, 2, "its worker process died, 3 times in all: killed, out of memory, or a crash in native code"),
        (WORKER, 0, "its worker process died: killed, out of memory, or a crash in native code"),
    ],
)
def test_a_run_under_which_worker_after_worker_dies_is_failed_after_its_retries(loop, account, retries, reason):
    one = loop(node_retries=retries)
    for _ in range(retries):
        one.lose(account)
        assert one.status()["state"] == "queued"
    one.lose(account, is_last=True)
    assert (one.status()["state"], one.status()["reason"]) == ("failed", reason)
    assert one.trials[1].directory.traceback_file.read_text().count(account) == retries + 1


def test_a_node_that_is_taken_away_is_one_of_the_retries_for_tune_as_for_the_board(tmp_path):
    trial = fakes.imported("ray.tune.experiment.trial").Trial("a", stub=True)
    trial.storage = SimpleNamespace(trial_driver_staging_path=str(tmp_path))
    with set_environment(SETTINGS):
        trial.handle_error(fakes.imported("ray.exceptions").RayActorError(preempted=True))
    assert trial.run_metadata.num_failures == 1


def test_what_died_last_is_told_and_not_what_died_before(loop):
    one = loop(node_retries=1)
    one.lose(NODE)
    one.lose(WORKER, is_last=True)
    assert one.status()["reason"].startswith("its worker process died, 2 times in all")


def test_a_run_that_tune_gives_up_too_early_is_left_for_the_sweep_to_hand_out_again(loop):
    one = loop()
    one.lose(WORKER, is_last=True)  # as where a worker dies between two runs
    assert one.status()["state"] == "queued"
    assert len(one.said) == 1


def test_a_worker_that_cannot_start_ends_the_sweep_and_fails_nothing(loop):
    one = loop()
    one.lose(CREATION)
    with pytest.raises(
        RuntimeError, match="^no worker starts on a node of the Ray cluster: ImportError: no sweeps here$"
    ):
        one.step()
    assert one.status()["state"] == "queued"


def test_a_node_that_does_not_see_the_runs_folder_is_left_out_which_is_no_failure_of_the_run(loop, monkeypatch):
    one, node = loop(node_retries=0), {"NodeManagerHostname": "gpu-07", "NodeManagerAddress": "10.0.0.7"}
    monkeypatch.setattr(
        one.module, "list_living_nodes", lambda: [{"NodeID": "8a2f", "Resources": {"CPU": 1.0}, **node}]
    )
    monkeypatch.setattr(ray_cluster, "_session", session := ray_cluster.Session(None, Watch()))
    for _ in range(2):
        assert one.lose(BLIND).max_failures == 3
    one.step()
    assert one.said == [
        f"node gpu-07 (10.0.0.7) of the Ray cluster and the runs' folder {one.folder}: it is not there; it is left out "
        "(every node must see it under the same path; put runs_dir on a shared file system)"
    ]
    assert (session.left_out, one.status()["state"]) == ({"8a2f"}, "queued")


def test_when_the_last_node_has_died_the_sweep_ends_and_says_so(loop, monkeypatch):
    one = loop()
    monkeypatch.setattr(one.module, "NO_NODE_S", 0.0)
    with pytest.raises(
        RuntimeError, match="no node of the Ray cluster that has room for a trial is left; the same command goes on"
    ):
        one.step()


@pytest.mark.parametrize(("resources", "status"), [({"CPU": 1.0}, "PENDING"), ({}, "RUNNING")])
def test_a_node_with_room_or_a_run_that_is_worked_on_keeps_the_sweep_waiting(loop, resources, status):
    one = loop()
    one.nodes = [resources]
    one.board._had_room_at -= one.module.NO_NODE_S + 1
    one.step(status)
    assert one.board.num_running == (status == "RUNNING")


@pytest.fixture
def standing(tmp_path, monkeypatch):
    """A loop with ``ray.hang_s=30`` over a run that this process works on, and that took its last step long ago.
    ``clock``: the loop's, to be set; ``killed``: whom it killed."""
    loop = Loop(tmp_path, monkeypatch, hang_s=30.0)
    clock, killed, directory = [0.0], [], loop.trials[1].directory
    monkeypatch.setattr(loop.module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(loop.module, "kill", lambda process: not killed.append(process))
    directory.set_status("running", step=0, num_steps=4, phase="training")
    fakes.log_step(directory, 1, wall_s=0.1)
    for file in (directory.metrics_file, directory.status_file):
        os.utime(file, (1e9, 1e9))
    lock = loop.trials[1].lock
    assert lock.acquire()
    yield loop, clock, killed
    lock.release()


def look_at(loop, clock, *times):
    for clock[0] in times:
        loop.step("RUNNING")


def test_a_worker_without_a_step_for_too_long_is_killed_once_and_the_user_told(standing):
    loop, clock, killed = standing
    look_at(loop, clock, 0.0, 20.0, 30.0)
    assert killed == [], "a new worker finds files of the one before it"
    look_at(loop, clock, 31.0, 40.0, 100.0)
    assert killed == [Process.current()]
    assert loop.said == ["kills the process of sa lr=0.01 seed=1 (000000000001): no step for 30 s (ray.hang_s)"]


@pytest.mark.parametrize("why", ["a step", "another phase", "saved", "another sweep's", "not asked for"])
def test_a_worker_that_does_not_hang_is_not_killed(standing, why):
    loop, clock, killed = standing
    trial = loop.trials[1]
    if why == "a step":
        fakes.log_step(trial.directory, 2, wall_s=0.2)
    elif why == "not asked for":
        loop.board._hang_s = None
    elif why == "another sweep's":
        loop.board._job = replace(loop.board._job, trials={trial.run_id: replace(trial, launch="own")})
    else:
        state, phase = ("running", "curvature") if why == "another phase" else ("interrupted", "training")
        trial.directory.set_status(state, step=1, num_steps=4, phase=phase)
        os.utime(trial.directory.status_file, (1e9, 1e9))
    look_at(loop, clock, 0.0, 31.0, 62.0)
    assert killed == [] and loop.said == []
