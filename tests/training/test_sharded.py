"""A run split over two processes against the same steps in float64, against the run of one process, and against
interruptions."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from types import SimpleNamespace

import pytest
import torch

from stability import registry
from stability.build import build_model, build_objective, build_optimizer
from stability.corpora.cache import load
from stability.objectives import training_examples
from stability.optimizers import use_averages
from stability.runs.directory import RunDirectory, read_jsonl
from stability.training import checkpoint
from stability.training.devices.sharded import ShardedDevices
from stability.training.run import Trainer, train
from sweeps.trial import Trial, run_trial
from tests.conftest import Lab
from tests.reading import read_spec
from tests.within import assert_within

# the halves of a batch count differently
WEIGHTED = {"plugins": ["tests.training.weighted"], "objective": {"name": "weighted"}}
# the gradient's norm is above 1
SGD = {"optimizer": {"name": "sgd", "momentum": 0.9}, "lr_peak": 0.3, "clip_norm": 0.5}
# Rounding differs between sums made in two orders as it differs between runs: both are off from float64 by as much, up
# to luck.
LUCK = 5


def run(lab, spec, folder, *, shards=0, steps=None):
    """To the end, or left after ``steps`` steps as an interrupted launcher does."""
    directory = RunDirectory(folder, lab.directory(spec).run_id)
    generator = train(spec, directory, cache_dir=lab.cache, device="cpu", devices=shards or 1, shard=bool(shards))
    for number, _ in enumerate(generator, 1):
        if number == steps:
            generator.close()
            break
    return directory


def weights(directory):
    return checkpoint.load(directory.checkpoints()[-1])[1].state_dict()


def by_hand(lab, spec):
    """The weights after all steps in float64: whole batches, gradients from autograd, clipped by the formula."""
    corpus = load(lab.cache, spec.data_fingerprint)
    objective, model = build_objective(spec, corpus.vocab_size), build_model(spec, corpus.vocab_size).double()
    optimizer = build_optimizer(spec, model)
    for step in range(1, spec.steps + 1):
        total, count = objective.loss(
            model, training_examples(spec, corpus, objective, "train", step, seed=spec.seed, batch=spec.batch)
        )
        gradients = torch.autograd.grad(total / count, list(model.parameters()))
        norm = torch.sqrt(sum((gradient**2).sum() for gradient in gradients))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient * min(1.0, spec.clip_norm / (norm.item() + 1e-6))
        optimizer.step()
    with use_averages(optimizer):  # what a checkpoint holds
        return {name: value.clone() for name, value in model.state_dict().items()}


def off(found, truth) -> float:
    return max((found[key].double() - truth[key]).abs().max().item() for key in truth)


def assert_as_right(sharded, alone, truth):
    """As close to float64 as the run of one device is, which is close."""
    assert_within(off(alone, truth), 1e-5)
    assert off(dict.fromkeys(truth, torch.zeros(())), truth) > 1e-5
    # by luck one device may be exact: no less than a unit of the largest weight is asked
    unit = torch.finfo(torch.float32).eps * max(float(value.abs().max()) for value in truth.values())
    assert_within(off(sharded, truth), LUCK * max(off(alone, truth), unit))


def stored_bytes(trainer):
    """What of parameters, gradients and optimizer state lies in this process."""
    states = [
        value
        for state in trainer.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    ]
    tensors = [*trainer.parameters, *(parameter.grad for parameter in trainer.parameters), *states]
    # gradients share one
    storages = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in trainer.devices.local(tensors)
    }
    return sum(storages.values())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One spec trained alone and over two shards, and what each process stored at the end."""
    folder, stored = tmp_path_factory.mktemp("sharded"), []
    lab = Lab(folder)
    judge = Trainer.judge
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_plugins", dict(registry._plugins))
        registry.add_plugin(*WEIGHTED["plugins"])
        spec = lab.spec(batch=6, microbatch=2, log={"gradients": 4, "activations": 4}, **WEIGHTED, **SGD)
        patch.setattr(
            Trainer, "judge", lambda self, wall_s: (stored.append(stored_bytes(self)), judge(self, wall_s))[1]
        )
        alone, sharded = run(lab, spec, folder / "alone"), run(lab, spec, folder / "sharded", shards=2)
        yield SimpleNamespace(
            lab=lab, spec=spec, alone=alone, sharded=sharded, stored=[*stored], truth=by_hand(lab, spec)
        )


def test_two_shards_are_as_close_to_float64_as_one_device(made):
    corpus = load(made.lab.cache, made.spec.data_fingerprint)
    objective = build_objective(made.spec, corpus.vocab_size)
    batches = [training_examples(made.spec, corpus, objective, "train", step, seed=0, batch=6) for step in range(1, 13)]
    shares = [
        (objective.count(batch.split(3)[0], torch.float32) / objective.count(batch, torch.float32)).item()
        for batch in batches
    ]
    assert min(shares) < 0.4 or max(shares) > 0.6, "a mean of means would be another number"
    assert_as_right(weights(made.sharded), weights(made.alone), made.truth)


def test_their_logs_agree_to_rounding(made):
    for name in ("metrics_file", "gradients_file", "activations_file"):
        pairs = list(
            zip(*(read_jsonl(getattr(directory, name)) for directory in (made.alone, made.sharded)), strict=True)
        )
        assert pairs
        for alone, sharded in pairs:
            assert sharded == {
                key: pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
                for key, value in alone.items()
            }
    assert all(row["grad_norm"] > 2 * made.spec.clip_norm for row in list(read_jsonl(made.sharded.metrics_file))[1:]), (
        "clipped at every step"
    )
    assert {row["shards"] for row in read_jsonl(made.sharded.timing_file)} == {2}


def test_adams_moments_of_each_block_are_those_of_one_device(lab, tmp_path):
    spec = lab.spec(steps=3, batch=4, log={"activations": 1}, optimizer={"name": "adamw", "epsilon": 1e-3})
    alone, sharded = run(lab, spec, tmp_path / "alone"), run(lab, spec, tmp_path / "sharded", shards=2)
    found = [
        {(row["step"], row["block"]): row for row in read_jsonl(directory.activations_file) if "rms_t" in row}
        for directory in (alone, sharded)
    ]
    assert found[0].keys() == found[1].keys() and len(found[0]) > 3 * 4
    for key, row in found[0].items():
        assert found[1][key]["rms_t"] == pytest.approx(row["rms_t"], rel=1e-4)
        assert found[1][key]["tiny_share"] == pytest.approx(row["tiny_share"], abs=0.01)
    assert any(0 < row["tiny_share"] < 1 for row in found[0].values())


def test_validation_of_the_same_weights_is_the_same_number_bit_for_bit(made):
    first = [next(read_jsonl(directory.metrics_file))["val_nll"] for directory in (made.alone, made.sharded)]
    assert first[0] == first[1]


def test_each_process_stores_half(made):
    """Parameters, gradients, momentum; tensors whose first axis is odd are split unevenly, which the slices pad."""
    alone, sharded = made.stored
    assert alone == 3 * 4 * sum(value.numel() for value in made.truth.values())
    assert sharded == pytest.approx(alone / 2, rel=0.02)


def test_an_interrupted_run_goes_on_sharded_bit_for_bit_and_alone_to_rounding(made, tmp_path):
    left = run(made.lab, made.spec, tmp_path / "left", shards=2, steps=5)
    assert left.checkpoints()[-1].name == "step_000005"
    shutil.copytree(tmp_path / "left", tmp_path / "alone")
    run(made.lab, made.spec, tmp_path / "left", shards=2)
    assert left.metrics_file.read_bytes() == made.sharded.metrics_file.read_bytes()
    assert (left.checkpoints()[-1] / checkpoint.MODEL).read_bytes() == (
        made.sharded.checkpoints()[-1] / checkpoint.MODEL
    ).read_bytes()
    assert_as_right(weights(run(made.lab, made.spec, tmp_path / "alone")), weights(made.alone), made.truth)


def shapes(value):
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, tuple(value.shape), value.device.type
    if isinstance(value, dict):
        return {key: shapes(item) for key, item in value.items()}
    return [shapes(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", registry.Registry("optimizers").names(elementwise=True))
def test_a_checkpoint_is_what_one_device_writes_and_either_reads_the_other_s(lab, tmp_path, optimizer):
    spec = lab.spec(optimizer={"name": optimizer} | ({"momentum": 0.9} if optimizer == "sgd" else {}))
    alone, sharded = run(lab, spec, tmp_path / "a", steps=5), run(lab, spec, tmp_path / "b", shards=2, steps=5)
    folders = [directory.checkpoints()[-1] for directory in (alone, sharded)]
    found = [checkpoint.load_trainer(folder)["optimizer"] for folder in folders]
    assert shapes(found[0]) == shapes(found[1])
    assert shapes(checkpoint.load(folders[0])[1].state_dict()) == shapes(checkpoint.load(folders[1])[1].state_dict())
    run(lab, spec, tmp_path / "a", shards=2)
    run(lab, spec, tmp_path / "b")
    straight = weights(run(lab, spec, tmp_path / "straight"))
    truth = by_hand(lab, spec)
    assert_as_right(weights(alone), straight, truth)
    assert_as_right(weights(sharded), straight, truth)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        # a conditioned model, a head that is read in pieces
        {"mechanism": {"name": "sc"}, "objective": {"name": "score_entropy", "loss_chunk": 7}},
        {
            "mechanism": {"name": "mix"},
            "cross": {"name": "cc"},
            "objective": {"name": "mlm", "context": 8},
            "norm": "rmsnorm",
        },
    ],
)
def test_models_of_other_parts_follow_one_device(lab, tmp_path, changes):
    spec = lab.spec(**SGD, **changes)
    assert_as_right(
        weights(run(lab, spec, tmp_path / "b", shards=2)), weights(run(lab, spec, tmp_path / "a")), by_hand(lab, spec)
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["skip_step", "restore_last_good"])
def test_guards_act_at_the_same_steps_as_on_one_device(lab, tmp_path, mode):
    guards = {"on_nonfinite": mode, "retries": 9, "post_clip_norm": 1.52}
    spec = lab.spec(guards=guards, clip_norm=3.0, checkpoint={"every_steps": 2})
    alone, sharded = (list(read_jsonl(run(lab, spec, tmp_path / str(n), shards=n).metrics_file)) for n in (0, 2))
    counts = ("skipped_steps", "restores", "restored_step")
    assert [[row.get(key) for key in counts] for row in alone] == [[row.get(key) for key in counts] for row in sharded]
    assert 0 < alone[-1]["skipped_steps" if mode == "skip_step" else "restores"] < 9
    assert sharded[-1]["val_nll"] == pytest.approx(alone[-1]["val_nll"], rel=1e-5)


@pytest.mark.slow
def test_divergence_is_the_verdict_that_one_device_gives(lab, tmp_path):
    spec = lab.spec(lr_peak=1e30, optimizer={"name": "sgd"})
    alone, sharded = (run(lab, spec, tmp_path / str(n), shards=n).status() for n in (0, 2))
    assert alone["state"] == sharded["state"] == "diverged"
    assert alone["reason"] == sharded["reason"]


def helpers() -> list[int]:
    return [
        int(pid)
        for pid in subprocess.run(
            ["pgrep", "-P", str(os.getpid()), "-f", "stability.training.devices.helper"], capture_output=True, text=True
        ).stdout.split()
    ]


@pytest.mark.slow
def test_the_death_of_a_device_fails_the_run_with_a_word_and_leaves_no_process(lab):
    spec = lab.spec()
    trial = Trial(
        lab.directory(spec).run_id,
        spec.model_dump(mode="json"),
        str(lab.pool),
        None,
        "cpu",
        None,
        devices=3,
        shard=True,
    )
    trial.spec["batch"] = 6
    generator = run_trial(trial)
    next(generator)
    first, second = helpers()
    os.kill(second, signal.SIGKILL)
    assert list(generator) == []
    status = trial.directory.status()
    assert (status["state"], status["reason"]) == (
        "failed",
        "RuntimeError: the process of device 2 died with code -9: no word",
    )
    assert helpers() == []


@pytest.mark.slow
def test_a_device_that_cannot_begin_says_why(lab, tmp_path):
    spec = lab.spec()
    with pytest.raises(
        RuntimeError,
        match="the process of device 1 died with code 1: ValueError: no prepared data with the fingerprint",
    ):
        ShardedDevices.start(spec, tmp_path / "nowhere", torch.device("cpu"), 2)
    assert helpers() == []


@pytest.mark.slow
def test_signals_to_all_processes_leave_a_run_that_goes_on(lab, tmp_path):
    """A terminal's Ctrl-C, a batch system's SIGTERM: the run's own process ends the step and closes, for which it needs
    its helpers."""
    spec = lab.spec()
    generator = train(spec, lab.directory(spec), cache_dir=lab.cache, device="cpu", devices=2, shard=True)
    next(generator)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(helpers()[0], number)
    next(generator)
    generator.close()
    assert lab.directory(spec).checkpoints()[-1].name == "step_000002"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "devices_per_trial is 1; give devices_per_trial=2 or more"),
        (
            ["devices_per_trial=3"],
            "batch=8 must be a multiple of devices_per_trial=3, since all devices take equally many sequences",
        ),
        (
            ["devices_per_trial=2", "launcher=slurm", "slurm.gpus=1"],
            "slurm.gpus=1 must be at least devices_per_trial=2",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_in_a_line(words, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_spec("sweep", ["shard_parameters=true", *words])
    assert len(str(caught.value).splitlines()) == 1


def test_an_optimizer_that_needs_whole_matrices_is_refused(monkeypatch):
    from stability.optimizers.sgd import SGD as Optimizer

    words = ["shard_parameters=true", "devices_per_trial=2", "optimizer=[adamw,sgd]"]
    assert read_spec("sweep", words).name == read_spec("sweep", words[2:]).name, (
        "how a sweep runs is no part of its name"
    )
    monkeypatch.setattr(Optimizer, "elementwise", False)
    with pytest.raises(ValueError, match="optimizer=sgd needs whole tensors"):
        read_spec("sweep", words)


@pytest.mark.parametrize("is_sharded", [True, False])
def test_two_devices_have_the_gradient_of_the_whole_batch_of_a_mixture_of_experts(lab, tmp_path, is_sharded):
    """One step of plain descent at rate 1 moves the weights by the gradient, router and losses included."""
    spec = lab.spec(
        ffn={"name": "moe", "experts": 4, "balance": 0.5, "z_loss": 0.1},
        optimizer={"name": "sgd", "momentum": 0.0},
        batch=6,
        microbatch=3,
        steps=1,
        lr_peak=1.0,
        clip_norm=None,
    )
    corpus = load(lab.cache, spec.data_fingerprint)
    objective, model = build_objective(spec, corpus.vocab_size), build_model(spec, corpus.vocab_size).double()
    batch = training_examples(spec, corpus, objective, "train", 1, seed=spec.seed, batch=6)
    total = objective.training_loss(model, batch).total / objective.count(batch, torch.float64)
    gradients = dict(
        zip(dict(model.named_parameters()), torch.autograd.grad(total, [*model.parameters()]), strict=True)
    )
    directory = RunDirectory(tmp_path, lab.directory(spec).run_id)
    for _ in train(spec, directory, cache_dir=lab.cache, device="cpu", devices=2, shard=is_sharded):
        pass
    moved = weights(directory)
    assert max(gradient.abs().max() for name, gradient in gradients.items() if "router" in name) > 1e-3
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value - moved[name].double(), gradients[name], rtol=0, atol=1e-6)
