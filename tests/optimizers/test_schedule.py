"""Learning rates over the steps, against numbers worked out by hand, and which schedules an optimizer takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from analysis.numbers.transfer import _recipe
from analysis.study.wording import recipe
from stability.config.identity import run_id
from stability.config.training import ScheduleSpec
from stability.optimizers import lr_factor
from stability.registry import Registry
from tests.reading import read_spec


def factors(num_steps, **settings):
    schedule = ScheduleSpec(**settings)
    return [lr_factor(schedule, step, num_steps) for step in range(1, num_steps + 1)]


def test_wsd_warms_up_stays_and_falls_linearly_over_its_last_share():
    found = factors(10, name="wsd", warmup_steps=2, decay_share=0.4, final_ratio=0.2)
    # from 1 towards 0.2, which the step after the last would have: four steps of 0.2 each
    assert found == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4])
    assert lr_factor(ScheduleSpec(name="wsd", decay_share=0.4, final_ratio=0.2), 11, 10) == pytest.approx(0.2)


def test_wsd_that_decays_over_all_steps_is_the_linear_schedule():
    assert factors(7, name="wsd", decay_share=1.0) == pytest.approx(factors(7, name="linear"))


def test_a_share_of_less_than_a_step_is_one_step():
    assert factors(4, name="wsd", decay_share=0.01, final_ratio=0.5) == [1, 1, 1, 1]
    assert ScheduleSpec(name="wsd", decay_share=0.01).decay_steps(4) == 1


def test_what_decays_stays_positive_when_it_heads_for_0():
    assert min(factors(5, name="wsd", decay_share=0.6, final_ratio=0.0)) == pytest.approx(1 / 3)


def test_warm_up_and_decay_must_fit_the_steps():
    words = ["schedule=wsd", "steps=10", "schedule.warmup_steps=6", "schedule.decay_share=0.5", "launcher=serial"]
    with pytest.raises(ValueError) as caught:
        read_spec("sweep", words)
    assert str(caught.value) == (
        "schedule.warmup_steps=6 and the 5 steps of schedule.decay_share=0.5 are more than steps=10; give less of either"
    )
    assert read_spec("sweep", [*words, "schedule.warmup_steps=5"]).schedule.warmup_steps == 5


@pytest.fixture
def only_constant(monkeypatch):
    monkeypatch.setattr(Registry("optimizers").load("sgd"), "schedules", ("constant", "wsd"))


@pytest.mark.usefixtures("only_constant")
def test_a_schedule_that_does_not_fit_an_optimizer_is_refused_in_a_line_that_names_those_that_do(lab):
    line = "schedule=cosine does not fit optimizer=sgd, which takes schedule=constant or wsd; choose that, or leave sgd out"
    with pytest.raises(ValueError) as caught:
        read_spec("sweep", ["optimizer=[adamw,sgd]", "schedule=cosine", "launcher=serial"])
    assert str(caught.value) == line
    with pytest.raises(ValueError) as caught:
        lab.spec(optimizer={"name": "sgd"}, schedule={"name": "cosine"})
    assert str(caught.value) == line
    assert read_spec("sweep", ["optimizer=[adamw,sgd]", "schedule=wsd"]).schedule.name == "wsd"
    assert read_spec("sweep", ["optimizer=adamw", "schedule=cosine"]).schedule.name == "cosine"


def test_a_run_that_does_not_decay_keeps_the_id_of_before_the_share(lab):
    from stability.config.identity import essence, run_id

    spec = lab.spec(schedule={"name": "cosine", "warmup_steps": 2})
    assert "decay_share" not in essence(spec)
    wsd = [lab.spec(schedule={"name": "wsd", "decay_share": share}) for share in (0.2, 0.5)]
    assert run_id(wsd[0]) != run_id(wsd[1])


def test_a_warmup_share_is_that_share_of_the_steps():
    found = factors(8, name="constant", warmup_share=0.25)
    assert found == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1])
    assert factors(8, name="cosine", warmup_share=0.25) == factors(8, name="cosine", warmup_steps=2)
    assert factors(8, name="constant", warmup_share=0.01)[0] == 0.5, "at least one step"


def test_a_sweeps_runs_with_a_warmup_share_are_those_of_as_many_steps():
    words = ["steps=[20,40]", "launcher=serial"]
    by_share, by_steps = (
        [run_id(run) for run in read_spec("sweep", [*words, word]).expand("0" * 64)]
        for word in ("schedule.warmup_share=0.1", "schedule.warmup_steps=2")
    )
    assert by_share == by_steps
    varied = read_spec("sweep", ["mechanism=sa", "steps=20", "vary.schedule.warmup_share=[0.1,0.5]", "launcher=serial"])
    assert [(label, run.schedule.warmup_steps) for label, run in varied.kinds()] == [
        ("warmup_share=0.1", 2),
        ("warmup_share=0.5", 10),
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["schedule.warmup_share=0.1", "schedule.warmup_steps=2"],
            "schedule.warmup_share=0.1 and schedule.warmup_steps=2 both set the warm-up; give warmup_steps=0 beside a share",
        ),
        (
            ["schedule=wsd", "schedule.warmup_share=0.6", "schedule.decay_share=0.5"],
            "schedule.warmup_steps=6 and the 5 steps of schedule.decay_share=0.5 are more than steps=10; give less of "
            "either",
        ),
        (["schedule.warmup_share=1.5"], "schedule.warmup_share=1.5: input should be less than 1"),
    ],
)
def test_warmups_that_cannot_be_are_refused(words, line):
    with pytest.raises(ValueError) as caught:
        read_spec("sweep", ["steps=10", "launcher=serial", *words])
    assert str(caught.value) == line


def test_a_report_words_a_warmup_share_and_a_law_compares_it_with_steps():
    studies: list[Any] = [
        SimpleNamespace(
            spec={"steps": 40, "clip_norm": None, "schedule": {"name": "constant", **schedule}},
            runs={"optimizer": ["sgd"], "data_fingerprint": ["0"]},
        )
        for schedule in ({"warmup_steps": 0, "warmup_share": 0.05}, {"warmup_steps": 2}, {"warmup_steps": 4})
    ]
    by_share, by_steps, longer = studies
    assert recipe(by_share) == (
        "sgd, constant learning rate after a warm-up over 5 % of the steps, no gradient clipping"
    )
    assert _recipe(by_share) == _recipe(by_steps) != _recipe(longer)
