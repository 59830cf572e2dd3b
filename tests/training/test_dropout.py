"""What training drops: by draws that depend on seed, step and microbatch alone, and only where a step is trained on."""

from __future__ import annotations

import pytest

from stability.config.identity import run_id
from stability.runs.directory import read_jsonl
from stability.training import checkpoint
from tests.conftest import TINY

SIZE = {**TINY["model"], "dropout": 0.3}


def spec_of(lab, **changes):
    return lab.spec(**{"model": SIZE, "batch": 6, "microbatch": 4} | changes)


def held(directory):
    return directory.metrics_file.read_bytes(), (directory.checkpoints()[-1] / checkpoint.MODEL).read_bytes()


@pytest.mark.parametrize("stop_at", [1, 4, 7])
def test_an_interrupted_run_goes_on_byte_for_byte(lab, stop_at):
    spec = spec_of(lab)
    straight = lab.train(spec)
    expected = held(straight)
    straight.path.rename(lab.pool / "aside")
    resumed = lab.train(spec, steps=stop_at)
    assert resumed.status()["state"] == "interrupted"
    lab.train(spec)
    assert held(resumed) == expected


def test_a_run_that_was_killed_between_two_checkpoints_goes_on_byte_for_byte(lab):
    spec = spec_of(lab)
    straight = lab.train(spec)
    expected = held(straight)
    straight.status_file.unlink()
    checkpoint.remove(straight.checkpoints()[-1])  # steps 5 to 12 are logged and have no checkpoint
    with open(straight.metrics_file, "a") as file:
        file.write('{"step": 13, "lo')
    lab.train(spec)
    assert held(straight) == expected


def test_the_setting_is_read_and_enters_the_id_unless_nothing_is_dropped(lab):
    plain = spec_of(lab, model=TINY["model"])
    assert run_id(spec_of(lab, model={**SIZE, "dropout": 0.0})) == run_id(plain) != run_id(spec_of(lab))
    first = [
        next(row for row in read_jsonl(lab.train(each).metrics_file) if row["step"]) for each in (plain, spec_of(lab))
    ]
    assert first[0]["loss"] != first[1]["loss"]
