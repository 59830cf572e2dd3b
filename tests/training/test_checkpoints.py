from __future__ import annotations

import random

import pytest

from stability.runs.directory import read_jsonl
from stability.training import checkpoint
from stability.training.step import Keeper, Replica


def names(directory) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in directory.checkpoints()]


def slow_oracle(every, keep_last, keep_best, first, last, nlls):
    """The folder after each step, by its rules one after another: write, then throw away. Yields (step, steps on
    disk)."""
    folder: set[int] = set()
    for step in range(1, last + 1):
        seen = {s: nlls[s] for s in nlls if s <= step}
        best = sorted(seen, key=lambda s: (seen[s], s))[:keep_best]
        cadence = [s for s in range(1, step + 1) if every and s % every == 0]
        newest = cadence if keep_last is None else cadence[-keep_last:]
        if keep_last is not None and step >= first:
            newest = [s for s in newest if s >= first]
        if step in {first, last, *best} or (cadence and cadence[-1] == step):
            folder.add(step)
            folder = {s for s in folder if s in {first, last, *best, *newest}}
        yield step, folder


@pytest.mark.parametrize("case", range(30))
def test_what_stays_is_what_the_rules_say_at_every_step(lab, case):
    draw = random.Random(case)
    last, evaluate = draw.randint(8, 30), draw.randint(1, 12)
    every, keep_best = draw.choice((0, 1, 2, 3, 5)), draw.choice((0, 1, 3))
    keep_last = draw.choice((None, 1, 2, 4)) if every else None
    plan = {"every_steps": every, "keep_last": keep_last, "keep_best": keep_best}
    keeper = Keeper(lab.spec(steps=last, evaluation={"every_steps": evaluate, "sequences": 8}, checkpoint=plan))
    nlls = {
        step: draw.choice((2.0, 2.5, draw.random()))
        for step in range(1, last + 1)
        if step % evaluate == 0 or step == last
    }
    folder: set[int] = set()
    for step, expected in slow_oracle(every, keep_last, keep_best, min(evaluate, last), last, nlls):
        before = keeper.may_be_due(step)
        if step in nlls:
            keeper.record_validation(step, nlls[step])
        assert keeper.is_due(step) >= before
        if keeper.is_due(step):
            assert keeper.is_due(step) and (before or step in nlls), (
                "a checkpoint falls only where the run is known to be sound"
            )
            folder = (folder | {step}) & keeper.choose_kept(step)
        assert folder == expected, step


def test_rolling_and_best_checkpoints_lie_beside_the_first_and_the_last(lab):
    plan = {"every_steps": 2, "keep_last": 2, "keep_best": 1}
    directory = lab.train(
        lab.spec(steps=15, checkpoint=plan, lr_peak=0.05, evaluation={"every_steps": 5, "sequences": 8})
    )
    nlls = {
        row["val_nll"]: row["step"]
        for row in read_jsonl(directory.metrics_file)
        if row["val_nll"] is not None and row["step"]
    }
    best = nlls[min(nlls)]
    assert names(directory) == sorted({5, 12, 14, 15, best})
    assert directory.status()["result"]["best_steps"] == [best]


def test_a_whole_checkpoint_stands_at_every_moment_after_the_first(lab, monkeypatch):
    """At each write and each removal: what takes its place stands already, and the newest on disk can be read."""
    seen = []
    for name in ("save", "remove"):
        real = getattr(checkpoint, name)

        def watched(folder, *rest, real=real, name=name, **more):
            standing = [path for path in lab.directory(spec).checkpoints() if path != folder or name == "save"]
            seen.append((name, folder.name, len(standing)))
            if len(seen) > 1:
                checkpoint.verify_manifest(standing[-1])
            return real(folder, *rest, **more)

        monkeypatch.setattr(checkpoint, name, watched)
    spec = lab.spec(
        steps=9, evaluation={"every_steps": 9, "sequences": 8}, checkpoint={"every_steps": 2, "keep_last": 1}
    )
    assert names(lab.train(spec)) == [9], "what is older than the first evaluation's goes once that stands"
    assert [step for step in seen if step[0] == "remove"] == [
        ("remove", f"step_{step:06d}", 1) for step in (2, 4, 6, 8)
    ]


def test_a_diverged_run_keeps_its_newest_rolling_checkpoints(lab, monkeypatch):
    take = Replica.train_step
    monkeypatch.setattr(
        Replica, "train_step", lambda self, step: take(self, step) | ({"loss": float("nan")} if step == 12 else {})
    )
    directory = lab.train(lab.spec(checkpoint={"every_steps": 3, "keep_last": 2}))
    assert directory.status()["state"] == "diverged"
    assert names(directory) == [4, 6, 9]


def test_a_damaged_checkpoint_is_written_again_when_its_step_comes(lab):
    directory = lab.train(lab.spec())
    directory.status_file.unlink()
    (directory.checkpoints()[-1] / "model.safetensors").write_bytes(b"cut short")
    lab.train(lab.spec())
    assert checkpoint.verify_manifest(directory.checkpoints()[-1])["step"] == 12
