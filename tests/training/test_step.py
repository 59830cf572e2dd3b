"""One step: its norms are of the step that was really taken, to the last bit; microbatches give the whole batch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stability.config.identity import run_id
from stability.models.backbone import block_of
from stability.runs.directory import read_jsonl
from stability.training.devices import OneDevice

MASKED = {"name": "mlm", "mask_rate": "sqrt"}


def parameters(replica) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in replica.model.named_parameters()}


@pytest.mark.parametrize("residual", ["identity", "mhc_lite"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_norm_is_that_of_the_parameters_difference_bit_for_bit(lab, optimizer, residual):
    replica = lab.replica(lab.spec(optimizer={"name": optimizer}, residual={"name": residual}, lr_peak=3e-2))
    for step in (1, 2, 3):
        before = parameters(replica)
        row = replica.train_step(step)
        moved = [value - before[name] for name, value in parameters(replica).items()]
        assert row["update_norm"] == nn.utils.get_total_norm(moved).item() > 0
        wide = torch.cat([part.double().flatten() for part in moved]).norm().item()
        assert row["update_norm"] == pytest.approx(wide, rel=1e-5)


def test_the_blocks_ratios_are_of_the_parameters_before_the_step(lab):
    replica = lab.replica(lab.spec(log={"gradients": 2}, lr_peak=0.1))
    replica.train_step(1)
    assert replica.signals == {}
    before = parameters(replica)
    replica.train_step(2)
    after = parameters(replica)
    found = {row["block"]: row["update_ratio"] for row in replica.signals["gradients"]}
    assert set(found) == {block_of(name) for name in before}
    for block, ratio in found.items():
        own = [name for name in before if block_of(name) == block]
        moved, weights = (
            torch.cat([part.double().flatten() for part in parts]).norm().item()
            for parts in ([after[name] - before[name] for name in own], [before[name] for name in own])
        )
        assert ratio == pytest.approx(moved / weights, rel=1e-5)


def test_a_step_that_is_left_out_moves_nothing(lab):
    replica = lab.replica(lab.spec(guards={"post_clip_norm": 1e-6}))
    before = parameters(replica)
    assert replica.train_step(1)["update_norm"] == 0.0
    assert all(torch.equal(value, before[name]) for name, value in parameters(replica).items())


def test_without_clipping_every_gradient_reaches_the_optimizer(lab):
    """As clipping at a norm beyond every number; the default clips these gradients."""
    found = {}
    for limit in (None, 1e30, 1e-3):
        replica = lab.replica(lab.spec(clip_norm=limit, optimizer={"name": "sgd"}))
        norm = replica.train_step(1)["grad_norm"]
        assert norm > 1e-3
        found[limit] = parameters(replica)
    assert all(torch.equal(value, found[1e30][name]) for name, value in found[None].items())
    assert any(not torch.equal(value, found[1e-3][name]) for name, value in found[None].items())


def test_an_infinite_norm_leaves_gradients_as_they_are_without_clipping():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), 3e38)
    assert torch.isinf(OneDevice.clip(OneDevice.__new__(OneDevice), [parameter], float("inf")))
    assert torch.equal(parameter.grad, torch.full((2,), 3e38))


@pytest.mark.parametrize("microbatch", [1, 2, 4, 5])
@pytest.mark.parametrize("objective", [MASKED, {"name": "ar"}])
def test_gradient_and_loss_are_the_whole_batch_s(lab, objective, microbatch):
    """By autograd over the whole batch in float64; 4 and 5 do not divide it, so that the last part is smaller."""
    made = lab.replica(lab.spec(objective=objective, batch=6, microbatch=microbatch))
    made.model.double()
    examples = made.objective.examples(
        made.corpus.batch("train", 6, made.objective.tokens_needed(16), torch.Generator().manual_seed(3)),
        torch.Generator(),
    )
    total, count = made.objective.loss_sum(examples.logits(made.model), examples)
    whole = torch.autograd.grad(total / count, made.parameters)
    (loss,) = made._backward(examples, step=1)
    # the count of sequences' weights is a float32
    torch.testing.assert_close(loss, (total / count).detach(), rtol=1e-6, atol=0)
    for parameter, expected in zip(made.parameters, whole, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-6, atol=1e-12)


def test_no_more_than_a_microbatch_goes_through_the_model_at_once(lab):
    made, seen = lab.replica(lab.spec(batch=6, microbatch=4)), []
    made.model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    made.train_step(1)
    assert seen == [4, 2]


def test_a_run_in_microbatches_follows_the_run_without(lab):
    rows = [list(read_jsonl(lab.train(lab.spec(batch=6, microbatch=part)).metrics_file)) for part in (None, 2)]
    for plain, parted in zip(*rows, strict=True):
        for key in ("loss", "grad_norm", "val_nll"):
            assert parted[key] == (plain[key] if plain[key] is None else pytest.approx(plain[key], rel=1e-5))
    assert rows[0] != rows[1], "sums in another order: the setting is read"


def test_microbatches_are_part_of_a_run_s_identity_and_their_absence_is_not(lab):
    assert (
        run_id(lab.spec(batch=6, microbatch=2))
        != run_id(lab.spec(batch=6))
        == run_id(lab.spec(batch=6, microbatch=None))
    )


@pytest.mark.parametrize("microbatch", [6, 7])
def test_a_microbatch_as_large_as_the_batch_is_refused(lab, microbatch):
    with pytest.raises(
        ValueError,
        match=f"microbatch={microbatch} must be below batch=6; microbatch=null uses the whole batch",
    ):
        lab.spec(batch=6, microbatch=microbatch)
