"""Population based training over the ledger: who goes on from whom, at which rate. Trials are fakes, but where a run goes
on from another one's checkpoint."""

import json
import math
import os
import signal

import pytest

from stability.config.identity import run_id
from stability.training import checkpoint
from tests.sweeps.searching import Sweep, cut_at

WORDS = (
    "search=pbt",
    "search.every_steps=6",
    "lr=[1e-4,1e-3,1e-2,1e-1]",
    "steps=18",
    "evaluation.every_steps=6",
    "seeds=2",
)


def rows_of(sweep):
    return sweep.study.read()["lineage"]


def test_the_worst_take_over_from_the_best_and_everybody_goes_on_from_a_run_of_the_segment_before(tmp_path):
    words = (*WORDS, "search.resample=0")
    sweep = Sweep(tmp_path, *words)
    assert sweep.run().num_trained == len(sweep.trained) == len({row["run_id"] for row in rows_of(sweep)})
    assert {(row["first_step"], row["last_step"]) for row in rows_of(sweep)} == {(0, 6), (6, 12), (12, 18)}
    for population in range(4):  # two mechanisms, two seeds
        own = [row for row in rows_of(sweep) if row["population"] == population]
        segments = [[row for row in own if row["segment"] == at] for at in (1, 2, 3)]
        assert [row["lr"] for row in segments[0]] == [1e-4, 1e-3, 1e-2, 1e-1]
        for before, after in zip(segments, segments[1:], strict=False):
            ids = [row["run_id"] for row in before]
            scores = [math.inf if row["score"] is None else row["score"] for row in before]
            best, worst = scores.index(min(scores)), scores.index(max(scores))
            for index, row in enumerate(after):
                spec = json.loads((sweep.study.pool / row["run_id"] / "spec.json").read_text())
                assert spec["init"] == {"run": row["parent"], "step": row["first_step"]}
                assert (spec["lr_peak"], spec["steps"]) == (row["lr"], row["last_step"])
                if index == worst:
                    assert row["took_over"] and row["parent"] == ids[best]
                    ratio = row["lr"] / before[best]["lr"]
                    assert abs(math.log(ratio)) == pytest.approx(math.log(1.25), abs=0.01)
                elif scores[index] < math.inf:
                    assert not row["took_over"] and row["parent"] == ids[index] and row["lr"] == before[index]["lr"]
    diverged = [row for row in rows_of(sweep) if row["score"] is None]
    assert diverged and not {row["run_id"] for row in diverged} & {row["parent"] for row in rows_of(sweep)}
    again = Sweep(tmp_path, *words)
    assert again.run().num_trained == 0 and not again.trained and again.study.read() == sweep.study.read()


def test_rates_drawn_anew_lie_within_the_first_ones(tmp_path):
    sweep = Sweep(tmp_path, *WORDS, "search.resample=1")
    sweep.run()
    drawn = [row["lr"] for row in rows_of(sweep) if row["took_over"]]
    assert len(set(drawn)) == len(drawn) >= 8 and all(1e-4 <= lr <= 1e-1 for lr in drawn)


@pytest.mark.parametrize("count", [3, pytest.param(19, marks=pytest.mark.slow), 40])
def test_a_training_of_populations_that_was_cut_off_ends_as_one_that_was_not(tmp_path, count):
    for name in ("cut", "whole"):
        (tmp_path / name).mkdir()
    cut, whole = Sweep(tmp_path / "cut", *WORDS), Sweep(tmp_path / "whole", *WORDS)
    whole.run()
    assert cut.run(cut_at(cut, count)).interrupted
    cut.run()
    assert sorted(cut.trained) == sorted(whole.trained) and rows_of(cut) == rows_of(whole)


def left_after_its_last_step(sweep):
    """A runner under which Ctrl-C comes between the last step of the second run and its verdict."""

    def train(trial):
        yield from sweep.train(trial)
        if len(sweep.trained) == 2:
            trial.directory.set_status("interrupted", step=trial.spec["steps"], num_steps=trial.spec["steps"])
            os.kill(os.getpid(), signal.SIGINT)
            yield

    return train


def test_a_run_that_was_left_after_its_last_step_gets_its_verdict_from_the_same_command(tmp_path):
    for name in ("cut", "whole"):
        (tmp_path / name).mkdir()
    cut, whole = Sweep(tmp_path / "cut", *WORDS), Sweep(tmp_path / "whole", *WORDS)
    whole.run()
    assert cut.run(left_after_its_last_step(cut)).interrupted
    cut.run()
    assert rows_of(cut) == rows_of(whole)


def test_a_segment_of_the_same_rate_is_the_rest_of_an_undisturbed_run_byte_for_byte(lab):
    whole, first = lab.spec(steps=12), lab.spec(steps=5)
    second = lab.spec(steps=12, init={"run": run_id(first), "step": 5})
    other = lab.spec(steps=12, init={"run": run_id(first), "step": 5}, lr_peak=1e-2)
    assert len({run_id(spec) for spec in (whole, first, second, other)}) == 4
    directories = [lab.train(spec) for spec in (whole, first)]
    directories += [lab.train(second, steps=3), lab.train(second), lab.train(other)]  # left in the middle, gone on with
    lines = [directory.metrics_file.read_text().splitlines() for directory in directories]
    assert lines[3] == lines[0][6:] and len(lines[3]) == 7
    models = [
        checkpoint.load(directory.checkpoints()[-1])[1].state_dict() for directory in (directories[0], directories[3])
    ]
    assert all((models[0][name] == models[1][name]).all() for name in models[0])
    rows = [json.loads(line) for line in (lines[3][0], lines[4][0])]
    assert (rows[0]["loss"], rows[0]["lr"], rows[1]["lr"]) == (rows[1]["loss"], 1e-3, 1e-2)  # the same weights
    assert rows[0]["update_norm"] < rows[1]["update_norm"]


def test_a_run_whose_beginning_is_not_there_says_so(lab):
    with pytest.raises(ValueError, match="no checkpoint at .*/0123456789ab/checkpoints/step_000005"):
        lab.train(lab.spec(steps=12, init={"run": "0123456789ab", "step": 5}))
    with pytest.raises(ValueError, match="init.step=12 must be below steps=12"):
        lab.spec(steps=12, init={"run": "0123456789ab", "step": 12})


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["lr=1e-3"], "search=pbt compares learning rates, and there is one; give several: lr=range"),
        (["schedule=cosine"], "search=pbt finds the schedule itself: schedule=cosine must be schedule=constant"),
    ],
)
def test_what_does_not_go_with_it_is_refused(tmp_path, words, text):
    with pytest.raises(ValueError, match=text):
        Sweep(tmp_path, *(word for word in WORDS if word.split("=")[0] != words[0].split("=")[0]), *words)
