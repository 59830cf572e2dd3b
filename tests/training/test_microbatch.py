"""A step taken in microbatches is the step of the whole batch."""

from __future__ import annotations

import pytest
import torch

from stability.config.identity import run_id
from stability.corpora.cache import load
from stability.runs.directory import RunDirectory, read_jsonl
from stability.training.trainer import Trainer

MASKED = {"name": "mlm", "mask_rate": "sqrt"}


def trainer(lab, tmp_path, **changes) -> Trainer:
    spec = lab.spec(**changes)
    return Trainer(spec, RunDirectory(tmp_path, "run"), load(lab.cache, spec.data_fingerprint), torch.device("cpu"))


@pytest.mark.parametrize("microbatch", [1, 2, 4, 5])
@pytest.mark.parametrize("objective", [MASKED, {"name": "ar"}])
def test_gradient_and_loss_are_the_whole_batch_s(lab, tmp_path, objective, microbatch):
    """By autograd over the whole batch in float64; 4 and 5 do not divide it, so that the last part is smaller."""
    made = trainer(lab, tmp_path, objective=objective, batch=6, microbatch=microbatch)
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


def test_no_more_than_a_microbatch_goes_through_the_model_at_once(lab, tmp_path):
    made, seen = trainer(lab, tmp_path, batch=6, microbatch=4), []
    made.model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    made.update(1)
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
        match=f"microbatch={microbatch} must be below batch=6, of which it is a part; microbatch=null takes the batch "
        "whole",
    ):
        lab.spec(batch=6, microbatch=microbatch)
