from __future__ import annotations

import pytest

from stability.config import ScheduleSpec, VerdictSpec
from stability.training.schedule import lr_factor
from stability.training.verdict import SpikeWatch, judge


def watched(losses):
    watch = SpikeWatch(VerdictSpec(smoothing_steps=2, spike_nats=0.5))
    for step, loss in enumerate(losses, 1):
        watch.update(step, loss)
    return watch


def test_a_falling_loss_is_stable():
    assert judge(2.0, 5.5, 3.3, watched([5, 4, 3, 2.5, 2])) == ("stable", "")


def test_no_better_than_token_frequencies_is_plateaued_even_after_a_spike():
    state, reason = judge(3.31, 5.5, 3.3, watched([3, 9, 9, 3, 3]))
    assert state == "plateaued"
    assert "3.310" in reason
    assert "3.300" in reason


def test_worse_than_the_initialisation_is_plateaued():
    assert judge(2.6, 2.5, 3.3, watched([3]))[0] == "plateaued"


def test_a_rise_beyond_the_margin_that_came_back_is_spiked_and_says_when():
    state, reason = judge(2.0, 5.5, 3.3, watched([3, 3, 3, 6, 3, 2, 2, 2]))
    assert state == "spiked"
    assert "by step 4 and came back" in reason


def test_a_rise_that_never_came_back_says_so():
    assert "had not come back" in judge(2.9, 5.5, 3.3, watched([2, 2, 2, 6, 6]))[1]


def test_a_rise_within_the_margin_is_stable():
    assert judge(2.0, 5.5, 3.3, watched([3, 3, 3.8, 3]))[0] == "stable"


def test_the_watch_goes_on_from_its_saved_state():
    whole, first = watched([3, 2, 4, 2]), watched([3, 2])
    second = watched([])
    second.restore(first.state())
    second.update(3, 4)
    second.update(4, 2)
    assert second.state() == whole.state()


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_every_learning_rate_is_positive_and_warmup_rises_linearly(name):
    schedule = ScheduleSpec(name=name, warmup_steps=4, final_ratio=0.0)
    factors = [lr_factor(schedule, step, 20) for step in range(1, 21)]
    assert min(factors) > 0
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_decay_ends_near_its_final_ratio_and_constant_stays():
    assert lr_factor(ScheduleSpec(name="cosine", final_ratio=0.1), 1000, 1000) == pytest.approx(0.1, abs=1e-4)
    assert lr_factor(ScheduleSpec(name="linear", final_ratio=0.1), 501, 1000) == pytest.approx(0.55)
    assert lr_factor(ScheduleSpec(name="constant"), 777, 1000) == 1.0
