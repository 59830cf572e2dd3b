"""`benchmarks.readings`: ratios are of the same turn, and every reading that `sc` has is measured."""

from __future__ import annotations

from typing import get_args

import torch

from benchmarks import readings as benchmark
from benchmarks._training import Size, training
from stability.mechanisms.sc import SelfConsensus

TINY = Size(1, 8, 2, 8, 2)


def test_every_reading_is_measured():
    assert set(benchmark.READINGS) == set(get_args(SelfConsensus.Config.model_fields["rope"].annotation))


def test_ratios_are_of_the_same_turn(capsys):
    seconds = {"absolute": [1.0, 2.0, 4.0], "relative": [1.2, 2.0, 8.0]}
    plain, other = benchmark.report("training step", seconds)
    assert (plain.measured, other.measured) == (1.0, 1.2)
    assert "1.200" in capsys.readouterr().out and str(other).startswith("MISSED")


def test_the_pass_for_alpha_max_is_of_the_loss_that_a_step_lowers():
    trained = training({"mechanism": "sc", "objective": "mlm"}, TINY, "cpu")
    parameters = {name: each.detach() for name, each in trained.net.named_parameters()}
    loss = trained.loss(parameters)
    assert benchmark.alpha_max_of(trained)().loss == float(loss)
    trained.step()
    assert not torch.equal(trained.loss(dict(trained.net.named_parameters())), loss)
