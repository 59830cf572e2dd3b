"""What training drops: by draws that depend on seed, step and microbatch alone, and only where a step is trained on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from stability.build import build_model
from stability.config.identity import run_id
from stability.models.passes import dropping
from stability.objectives import training_examples
from stability.runs.directory import RunDirectory, read_jsonl
from stability.training import checkpoint
from stability.training.run import train
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


def masks_of(module, *draw):
    """What `dropping` has two equal modules drop of a tensor of ones, one after the other."""
    with dropping(module, torch.device("cpu"), *draw):
        return [module(torch.ones(2000)) == 0 for _ in range(2)]


def same_masks(one, two):
    return all(torch.equal(*pair) for pair in zip(one, two, strict=True))


FIRST = (0, "train", 5, 0)  # seed, purpose, step, first row


def test_draws_depend_on_nothing_that_was_drawn_before():
    module = torch.nn.Dropout(0.4)
    torch.manual_seed(1)
    one = masks_of(module, *FIRST)
    torch.rand(7)
    assert same_masks(one, masks_of(module, *FIRST))
    assert not torch.equal(*one), "the second place that drops has a mask of its own"


@pytest.mark.parametrize("other", [(1, "train", 5, 0), (0, "curvature", 5, 0), (0, "train", 6, 0), (0, "train", 5, 4)])
def test_draws_of_another_seed_purpose_step_or_microbatch_are_independent(other):
    module = torch.nn.Dropout(0.4)
    one, two = masks_of(module, *FIRST)[0], masks_of(module, *other)[0]
    share = 2 * 0.4 * 0.6  # where two independent masks differ
    assert abs((one != two).float().mean() - share) < 4 * math.sqrt(share * (1 - share) / 2000)


def test_the_global_generator_and_the_modes_are_given_back_even_after_an_error():
    model = torch.nn.Sequential(torch.nn.Dropout(0.4), torch.nn.Dropout(0.4)).eval()
    model[1].train()  # somebody's own choice
    torch.manual_seed(3)
    expected = torch.rand(5)
    torch.manual_seed(3)
    with pytest.raises(ZeroDivisionError), dropping(model, torch.device("cpu"), *FIRST):
        assert model.training and model[0].training
        torch.rand(2)
        raise ZeroDivisionError
    assert torch.equal(torch.rand(5), expected)
    assert [module.training for module in model.modules()] == [False, False, True]


def test_a_trained_model_stays_in_training_mode_but_for_validation(lab):
    made = lab.replica(spec_of(lab))
    seen = []
    made.model.register_forward_pre_hook(lambda model, _: seen.append(model.training))
    made.train_step(1)
    made.measure()
    made.train_step(2)
    assert seen == [True, True, False, True, True]


def dropped_rows(made, step):
    """(batch, N, D), True where step ``step`` drops what enters the first block."""
    seen = []
    handle = made.model.dropout.register_forward_hook(lambda _, args, output: seen.append(output == 0))
    made.train_step(step)
    handle.remove()
    return torch.cat(seen)


def test_steps_and_microbatches_of_a_run_draw_their_own_masks(lab):
    made = lab.replica(spec_of(lab, microbatch=3))
    one, two = dropped_rows(made, 1), dropped_rows(made, 2)
    assert torch.equal(dropped_rows(made, 1), one), "whatever was trained between"
    halves = [one[:3], one[3:], two[:3], two[3:]]
    assert not any(torch.equal(a, b) for index, a in enumerate(halves) for b in halves[:index])


def test_a_batch_that_is_cut_otherwise_draws_other_masks_but_in_its_first_rows(lab):
    """A microbatch is told by its first row: 3 + 3 and 2 + 2 + 2 rows have only a beginning in common."""
    threes, twos = (dropped_rows(lab.replica(spec_of(lab, microbatch=rows)), 1) for rows in (3, 2))
    assert torch.equal(threes[:2], twos[:2])
    assert not any(torch.equal(threes[row], twos[row]) for row in range(2, 6))


def test_the_gradient_is_that_of_the_masks_written_out(lab):
    """The masks, read off the forward pass, applied by hand to a model without dropout, in float64."""
    made = lab.replica(spec_of(lab, microbatch=None, model={**SIZE, "dropout_at": "branches"}))
    made.model.double()
    plain: Any = build_model(spec_of(lab, model=TINY["model"]), made.corpus.format).double()
    plain.load_state_dict(made.model.state_dict())
    examples = training_examples(made.spec, made.corpus, made.objective, "train", 3, seed=0, batch=6)
    masks: list[torch.Tensor] = []
    for block in made.model.blocks:
        block.dropout.register_forward_hook(lambda _, args, output: masks.append((output != 0).double() / 0.7))
    made._backward(examples, step=3)
    assert len(masks) == 4
    for block, (mixer, ffn) in zip(plain.blocks, zip(masks[::2], masks[1::2], strict=True), strict=True):
        block.mixer.register_forward_hook(lambda _, args, output, mask=mixer: output * mask)
        block.ffn.register_forward_hook(lambda _, args, output, mask=ffn: output * mask)
    total, count = made.objective.loss_sum(examples.logits(plain), examples)
    expected = torch.autograd.grad(total / count, list(plain.parameters()))
    for parameter, gradient in zip(made.parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-12)


def test_validation_drops_nothing(lab):
    made = lab.replica(spec_of(lab))
    plain = build_model(spec_of(lab, model=TINY["model"]), made.corpus.format)
    plain.load_state_dict(made.model.state_dict())
    first = made.measure()
    torch.rand(3)
    assert made.measure() == first == made.validation.measure(plain)
    assert made.model.training and all(block.dropout.training for block in made.model.blocks)


def run(lab, spec, folder, **options):
    directory = RunDirectory(folder, run_id(spec))
    for _ in train(spec, directory, cache_dir=lab.cache, device="cpu", **options):
        pass
    return directory


@pytest.mark.slow  # two processes that import torch; tests/training/test_parallel.py keeps a plain run in the fast suite
def test_two_processes_give_the_bits_of_one(lab, tmp_path):
    spec = spec_of(lab, batch=5, microbatch=2, steps=4)
    assert held(run(lab, spec, tmp_path / "shared", devices=2)) == held(run(lab, spec, tmp_path / "alone"))


@pytest.mark.slow  # the test above has two processes, `test_sharded` two shards
def test_two_shards_drop_what_one_device_drops_of_the_same_microbatches(lab, tmp_path):
    """Each shard's half of the batch begins at the row where the second microbatch of one device does."""
    spec = spec_of(lab, microbatch=3, steps=4)
    directories = [run(lab, spec, tmp_path / "alone"), run(lab, spec, tmp_path / "sharded", devices=2, shard=True)]
    alone, sharded = (list(read_jsonl(directory.metrics_file)) for directory in directories)
    for one, two in zip(alone, sharded, strict=True):
        assert two == {
            key: pytest.approx(value, rel=1e-4) if isinstance(value, float) else value for key, value in one.items()
        }
