from __future__ import annotations

import json
import re
import time

import pytest
import torch
from safetensors.torch import load_file

from stability.config.identity import tokenizer_id
from stability.structure.tokenizer import directory_of, load_tokenizer
from stability.structure.training import TokenizerTrainer
from tests.structure.small import chains, spec, train


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    pool = tmp_path_factory.mktemp("pool")
    return pool, train(pool, spec())


def parameters(directory):
    return load_file(directory.checkpoints()[-1] / "model.safetensors")


def test_a_tokenizer_is_found_by_its_id_and_gives_the_trained_tokens(finished):
    pool, directory = finished
    assert directory.path == pool / "tokenizers" / tokenizer_id(spec())
    tokenizer = load_tokenizer(pool, directory.run_id)
    stored = parameters(directory)
    assert all(torch.equal(value, stored[name]) for name, value in tokenizer.state_dict().items())
    assert not tokenizer.training and not any(parameter.requires_grad for parameter in tokenizer.parameters())
    assert directory.finished
    assert json.loads(directory.spec_file.read_text())["levels"] == [7, 5, 5]


def test_training_lowers_the_loss_of_both_stages(tmp_path):
    directory = train(tmp_path, spec(steps=60, atom_steps=60, every_steps=60, lr_peak=5e-3))
    rows = [json.loads(line) for line in directory.metrics_file.read_text().splitlines()][1:]
    for stage in (1, 2):
        losses = [row["loss"] for row in rows if row["stage"] == stage]
        assert len(losses) == 60
        assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert directory.status()["state"] == "stable"


def test_the_second_stage_leaves_encoder_and_light_decoder_alone(tmp_path):
    directory = train(tmp_path, spec(), leave_after=6)
    before = parameters(directory)
    train(tmp_path, spec())
    after = parameters(directory)
    moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"atom_decoder"}


@pytest.mark.parametrize("leave_after", [1, 4, 6, 8])
def test_a_tokenizer_left_in_either_stage_ends_as_an_undisturbed_one(finished, tmp_path, leave_after, capsys):
    _, undisturbed = finished
    train(tmp_path, spec(), leave_after=leave_after)
    if leave_after == 4:  # and once more
        train(tmp_path, spec(), leave_after=1)
    resumed = train(tmp_path, spec())
    assert "skips" not in capsys.readouterr().out
    expected = parameters(undisturbed)
    assert all(torch.equal(value, expected[name]) for name, value in parameters(resumed).items())
    assert resumed.metrics_file.read_bytes() == undisturbed.metrics_file.read_bytes()
    assert [path.name for path in resumed.checkpoints()] == ["step_000010"]


def test_a_finished_tokenizer_is_not_trained_again(finished):
    pool, directory = finished
    before = directory.status_file.read_bytes()
    train(pool, spec())
    assert directory.status_file.read_bytes() == before


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.pt"])
def test_a_truncated_checkpoint_is_refused_in_words(tmp_path, name):
    directory = train(tmp_path, spec(steps=3, atom_steps=0))
    path = directory.checkpoints()[-1] / name
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{name} is missing, truncated or altered"):
        load_tokenizer(tmp_path, directory.run_id)


def test_an_unknown_or_unfinished_tokenizer_is_refused_in_words(finished, tmp_path):
    pool, directory = finished
    with pytest.raises(
        ValueError, match=rf"no structure tokenizer 000000000000 in .*there: {directory.run_id}.*train_tokenizer"
    ):
        load_tokenizer(pool, "000000000000")
    left = train(tmp_path, spec(), leave_after=2)
    with pytest.raises(ValueError, match=f"{left.run_id} is interrupted"):
        load_tokenizer(tmp_path, left.run_id)
    with pytest.raises(ValueError, match=r"no structure tokenizer 000000000000 in .* \(there: none yet\)"):
        load_tokenizer(tmp_path, "000000000000")


def test_another_tokenizers_checkpoint_is_not_taken(finished, tmp_path):
    _, directory = finished
    other = train(tmp_path, spec(seed=1))
    model = directory.checkpoints()[-1]
    for path in model.iterdir():
        (other.checkpoints()[-1] / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match=re.escape(f"belongs to tokenizer {directory.run_id}, not to {other.run_id}")):
        load_tokenizer(tmp_path, other.run_id)


def test_the_id_follows_what_trains_and_not_where_the_chains_lie():
    base = tokenizer_id(spec())
    assert tokenizer_id(spec(data={"name": "text", "path": "README.md"})) != base
    assert tokenizer_id(spec(data={"name": "text", "path": "README.md"})) == tokenizer_id(
        spec(data={"name": "text", "path": "Makefile"})
    )
    for change in (
        {"seed": 1},
        {"levels": [5, 5, 5]},
        {"frame": "raw"},
        {"data_fingerprint": "other"},
        {"mechanism": "sw"},
        {"behaviour": 9},
    ):
        assert tokenizer_id(spec(**change)) != base, change


def test_a_loss_that_is_not_finite_is_a_verdict(tmp_path):
    directory = train(tmp_path, spec(lr_peak=1e30, clip_norm=1e30))
    status = directory.status()
    assert status["state"] == "diverged"
    assert re.search(r"at step \d", status["reason"])
    with pytest.raises(ValueError, match="is diverged"):
        load_tokenizer(tmp_path, directory.run_id)


def test_the_optimizer_decays_what_its_settings_say(tmp_path):
    """decay=matrices shrinks no vector: every bias, gain and norm then moves by its gradient alone, as without any
    decay in the first step."""
    found = {}
    for name, settings in {
        "none": {"weight_decay": 0.0},
        "matrices": {"weight_decay": 20.0, "decay": "matrices"},
        "all": {"weight_decay": 20.0},
    }.items():
        optimizer = {"name": "adamw", **settings}
        trainer = TokenizerTrainer(
            spec(optimizer=optimizer),
            directory_of(tmp_path / name, "x"),
            chains(),
            chains(2, first=50),
            torch.device("cpu"),
        )
        trainer.train_step(1)
        found[name] = {key: value.clone() for key, value in trainer.tokenizer.state_dict().items()}
    trained = [key for key in found["none"] if not key.startswith("atom_decoder.")]
    vectors, matrices = (
        [key for key in trained if (found["none"][key].ndim >= 2) == wanted] for wanted in (False, True)
    )
    assert vectors and matrices
    assert all(torch.equal(found["matrices"][key], found["none"][key]) for key in vectors)
    assert all(torch.equal(found["matrices"][key], found["all"][key]) for key in matrices)
    assert any(not torch.equal(found["all"][key], found["none"][key]) for key in vectors)
    assert all(
        not torch.equal(found["matrices"][key], found["none"][key]) for key in matrices if found["none"][key].any()
    )


def test_wall_time_counts_on_over_steps_and_interruptions(tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    directory = train(tmp_path, spec(), leave_after=6)
    seconds = [json.loads(line)["wall_s"] for line in directory.timing_file.read_text().splitlines()]
    assert seconds == [20.0, 40.0, 60.0, 80.0, 100.0, 120.0], "the clock is read at a step's beginning and end"
    train(tmp_path, spec())
    resumed = [json.loads(line)["wall_s"] for line in directory.timing_file.read_text().splitlines()]
    assert resumed[:6] == seconds and resumed[6:] == [140.0, 160.0, 180.0, 200.0]
