"""A tokenizer that is stopped, crashes or finds its checkpoints damaged says so and goes on; what it ends as is what an
undisturbed one ends as."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from stability.config.identity import tokenizer_id
from stability.runs.directory import INTERRUPTED
from stability.runs.lock import LostLock
from stability.structure import training
from stability.structure.tokenizer import directory_of, load_tokenizer
from stability.structure.training import train_tokenizer
from stability.training import checkpoint
from tests.structure.small import chain, chains, spec, train


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train(tmp_path_factory.mktemp("calm"), spec())


def same_end(one, other) -> bool:
    names = [path.name for path in one.checkpoints()]
    assert names == [path.name for path in other.checkpoints()] == ["step_000010"]
    first, second = (load_file(directory.checkpoints()[-1] / checkpoint.MODEL) for directory in (one, other))
    return one.metrics_file.read_bytes() == other.metrics_file.read_bytes() and all(
        value.equal(second[name]) for name, value in first.items()
    )


def test_a_tokenizer_that_is_left_is_interrupted_at_a_step_where_the_same_command_goes_on(undisturbed, tmp_path):
    directory = train(tmp_path, spec(), leave_after=4)
    status = directory.status()
    assert (status["state"], status["step"], status["reason"]) == (INTERRUPTED, 4, "interrupted at step 4 of 10")
    assert same_end(train(tmp_path, spec()), undisturbed)


def crash_at(monkeypatch, step, error):
    own = training.TokenizerTrainer.train_step

    def train_step(self, number):
        if number == step:
            raise error
        return own(self, number)

    monkeypatch.setattr(training.TokenizerTrainer, "train_step", train_step)


@pytest.mark.parametrize("error", [KeyError("lost"), OSError(28, "No space left on device")])
def test_a_crash_is_a_failure_with_its_traceback_and_the_same_command_goes_on(
    undisturbed, tmp_path, monkeypatch, error
):
    with monkeypatch.context() as patch, pytest.raises(RuntimeError) as caught:
        crash_at(patch, 8, error)
        train(tmp_path, spec())
    directory = directory_of(tmp_path, tokenizer_id(spec()))
    status = directory.status()
    assert (status["state"], status["step"]) == ("failed", 7) and type(error).__name__ in status["reason"]
    assert (
        "Traceback" in directory.traceback_file.read_text()
        and type(error).__name__ in directory.traceback_file.read_text()
    )
    lines = str(caught.value).splitlines()
    assert (
        len(lines) == 2
        and f"tokenizer {directory.run_id} failed: {type(error).__name__}" in lines[0]
        and str(directory.traceback_file) in lines[1]
    )
    with pytest.raises(ValueError, match=f"{directory.run_id} is failed"):
        load_tokenizer(tmp_path, directory.run_id)
    assert same_end(train(tmp_path, spec()), undisturbed)


def test_a_crash_while_it_opens_is_a_failure_too(tmp_path, monkeypatch):
    monkeypatch.setattr(training.TokenizerTrainer, "rmsd", lambda *_, **__: 1 // 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        train(tmp_path, spec())
    assert directory_of(tmp_path, tokenizer_id(spec())).status()["state"] == "failed"


def test_a_tokenizer_that_another_process_took_over_is_left_as_it_is(tmp_path):
    directory = directory_of(tmp_path, tokenizer_id(spec()))
    steps = train_tokenizer(spec(), directory, chains(), chains(4, 50), device="cpu")
    for _ in range(4):
        next(steps)
    before = directory.status_file.read_bytes(), [path.name for path in directory.checkpoints()]
    with pytest.raises(LostLock):
        steps.throw(LostLock(directory.path))  # type: ignore[attr-defined]
    assert before == (directory.status_file.read_bytes(), [path.name for path in directory.checkpoints()])


def damage(folder, name=checkpoint.MODEL):
    path = folder / name
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize("name", [checkpoint.MODEL, checkpoint.TRAINER, checkpoint.MANIFEST])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(undisturbed, tmp_path, name, capsys):
    directory = train(tmp_path, spec(), leave_after=8)
    assert [path.name for path in directory.checkpoints()] == ["step_000006", "step_000008"]
    damage(directory.checkpoints()[-1], name)
    resumed = train(tmp_path, spec())
    printed = capsys.readouterr().out
    assert "skips a damaged checkpoint" in printed and "from the beginning" not in printed
    assert same_end(resumed, undisturbed)


def test_a_damaged_checkpoint_at_a_step_that_is_reached_again_is_written_anew(undisturbed, tmp_path):
    directory = train(tmp_path, spec(), leave_after=9)
    assert directory.checkpoints()[-1].name == "step_000009"
    damage(directory.checkpoints()[-1])
    train(tmp_path, spec(), leave_after=3)  # from step 6 to 9
    checkpoint.verify_manifest(directory.checkpoints()[-1])
    assert directory.checkpoints()[-1].name == "step_000009"
    assert same_end(train(tmp_path, spec()), undisturbed)


def test_where_all_checkpoints_are_damaged_it_begins_anew_and_says_so(undisturbed, tmp_path, capsys):
    directory = train(tmp_path, spec(), leave_after=8)
    for folder in directory.checkpoints():
        damage(folder)
    resumed = train(tmp_path, spec())
    assert "no checkpoint of it can be read; trains from the beginning" in capsys.readouterr().out
    assert same_end(resumed, undisturbed)


def test_a_finished_tokenizer_without_a_readable_checkpoint_is_told_what_to_do(tmp_path):
    directory = train(tmp_path, spec(steps=3, atom_steps=0))
    damage(directory.checkpoints()[-1])
    with pytest.raises(
        ValueError,
        match=r"is finished but cannot be read; delete .* and train it again by the command in its provenance.json",
    ) as caught:
        load_tokenizer(tmp_path, directory.run_id)
    assert len(str(caught.value).splitlines()) == 2
    checkpoint.remove(directory.checkpoints()[-1])
    with pytest.raises(ValueError, match="no checkpoint in"):
        load_tokenizer(tmp_path, directory.run_id)


def test_traces_without_a_backbone_are_refused_before_anything_is_written(tmp_path):
    traces = [chain(seed, 20) for seed in range(3)]
    for each in traces:
        each.atoms14_NAX[:, [0, 2]] = float("nan")
    directory = directory_of(tmp_path, "0" * 12)
    for own, held_out, side in ((traces, chains(2), "chain to train on"), (chains(2), traces, "held-out chain")):
        with pytest.raises(
            ValueError,
            match=f"no {side} has N, CA and C of 4 residues or more; a tokenizer needs backbones, CA traces are not "
            "enough",
        ):
            next(train_tokenizer(spec(), directory, own, held_out, device="cpu"))
    assert not directory.path.exists()
