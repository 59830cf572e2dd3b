from __future__ import annotations

import math
import random

import pytest

from stability.config.training import ScheduleSpec, VerdictSpec
from stability.optimizers import lr_factor
from stability.runs.verdict import SpikeWatch, judge


def watched(losses):
    watch = SpikeWatch(VerdictSpec(smoothing_steps=2, spike_nats=0.5, noise_margin=0))
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


def noisy(*, seed, scatter, spike=0.0, steps=1500, noise_margin=8.0):
    """A loss that falls by a nat and scatters; ``spike`` is added to forty steps in its middle."""
    generator, watch = random.Random(seed), SpikeWatch(VerdictSpec(noise_margin=noise_margin))
    for step in range(1, steps + 1):
        loss = 5 + math.exp(-step / 100) + generator.gauss(0, scatter) + (spike if 700 <= step < 740 else 0)
        watch.update(step, loss)
    return watch


@pytest.mark.parametrize("seed", range(8))
def test_the_scatter_of_batches_is_no_spike_and_a_spike_beyond_it_is(seed):
    assert judge(2.0, 5.5, 3.3, noisy(seed=seed, scatter=0.7))[0] == "stable"
    assert judge(2.0, 5.5, 3.3, noisy(seed=seed, scatter=0.7, spike=2.0))[0] == "spiked"
    assert judge(2.0, 5.5, 3.3, noisy(seed=seed, scatter=0.05, spike=0.8))[0] == "spiked"


def test_without_a_noise_margin_the_same_scatter_passes_for_a_spike():
    assert judge(2.0, 5.5, 3.3, noisy(seed=0, scatter=1.0, noise_margin=0))[0] == "spiked"


@pytest.mark.parametrize("scatter", [0.02, 0.7])
def test_the_noise_of_the_smoothed_loss_is_what_an_exponential_mean_leaves_of_the_batches_scatter(scatter):
    noises, generator = [], random.Random(0)
    for _ in range(40):
        watch = SpikeWatch(VerdictSpec(smoothing_steps=20))
        for step in range(1, 1501):  # it falls all the time: the minimum stands near the end
            watch.update(step, 9 - step / 300 + generator.gauss(0, scatter))
        noises.append(watch.noise)
    assert sum(noises) / 40 == pytest.approx(scatter / math.sqrt(2 * 20 - 1), rel=0.05)


def test_the_first_loss_is_as_noisy_as_one_batch():
    watch = SpikeWatch(VerdictSpec(smoothing_steps=20))
    generator = random.Random(0)
    for step in range(1, 200):
        watch.update(step, 4.0 if step == 1 else 6.0 + generator.gauss(0, 0.5))
    assert watch.lowest == 4.0
    assert 0.2 < watch.noise < 1.0


def test_a_small_rise_in_quiet_counts_even_after_a_larger_one_in_noise():
    watch = noisy(seed=1, scatter=0.7, steps=400)
    for step in range(401, 1400):  # the scatter is gone, a new minimum comes, then the rise
        watch.update(step, 3.0 + (0.8 if step > 1200 else 0.0))
    assert watch.spiked


def test_a_rise_that_never_came_back_says_so():
    assert "had not come back" in judge(2.9, 5.5, 3.3, watched([2, 2, 2, 6, 6]))[1]


def test_a_rise_within_the_margin_is_stable():
    assert judge(2.0, 5.5, 3.3, watched([3, 3, 3.8, 3]))[0] == "stable"


def test_the_watch_goes_on_from_its_saved_state():
    whole, first = watched([3, 2, 4, 2]), watched([3, 2])
    second = watched([])
    second.resume(first.state())
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
