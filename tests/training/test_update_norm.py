"""``update_norm`` and the blocks' ratios are of the step that was really taken, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stability.corpora.cache import load
from stability.models.backbone import block_of
from stability.training.trainer import Trainer


def trainer_of(lab, **changes) -> Trainer:
    spec = lab.spec(**changes)
    return Trainer(spec, lab.directory(spec), load(lab.cache, spec.data_fingerprint), torch.device("cpu"))


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


@pytest.mark.parametrize("residual", ["identity", "mhc_lite"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_norm_is_that_of_the_parameters_difference_bit_for_bit(lab, optimizer, residual):
    trainer = trainer_of(lab, optimizer={"name": optimizer}, residual={"name": residual}, lr_peak=3e-2)
    for step in (1, 2, 3):
        before = parameters(trainer)
        row = trainer.update(step)
        moved = [value - before[name] for name, value in parameters(trainer).items()]
        assert row["update_norm"] == nn.utils.get_total_norm(moved).item() > 0
        wide = torch.cat([part.double().flatten() for part in moved]).norm().item()
        assert row["update_norm"] == pytest.approx(wide, rel=1e-5)


def test_the_blocks_ratios_are_of_the_parameters_before_the_step(lab):
    trainer = trainer_of(lab, log={"gradients": 2}, lr_peak=0.1)
    trainer.update(1)
    assert trainer.gradient_rows == []
    before = parameters(trainer)
    trainer.update(2)
    after = parameters(trainer)
    found = {row["block"]: row["update_ratio"] for row in trainer.gradient_rows}
    assert set(found) == {block_of(name) for name in before}
    for block, ratio in found.items():
        own = [name for name in before if block_of(name) == block]
        moved, weights = (
            torch.cat([part.double().flatten() for part in parts]).norm().item()
            for parts in ([after[name] - before[name] for name in own], [before[name] for name in own])
        )
        assert ratio == pytest.approx(moved / weights, rel=1e-5)


def test_a_step_that_is_left_out_moves_nothing(lab):
    trainer = trainer_of(lab, guards={"post_clip_norm": 1e-6})
    before = parameters(trainer)
    assert trainer.update(1)["update_norm"] == 0.0
    assert all(torch.equal(value, before[name]) for name, value in parameters(trainer).items())
