from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from kernels import availability
from stability.training import checkpoint


@pytest.fixture
def folder(lab) -> Path:
    return lab.train(lab.spec(steps=4)).checkpoints()[-1]


def test_load_gives_the_spec_and_the_trained_model_in_eval_mode(lab, folder):
    spec, model = checkpoint.load(folder)
    assert spec == lab.spec(steps=4)
    assert not model.training
    assert model(torch.zeros(1, 16, dtype=torch.long)).shape == (1, 16, 256)


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.pt"])
def test_one_flipped_bit_or_a_cut_is_refused_by_name(folder, name):
    path = folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=f"{name} is missing, truncated or altered"):
        checkpoint.load(folder)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"{name} is missing, truncated or altered"):
        checkpoint.load(folder)


def test_a_folder_that_is_no_checkpoint_says_what_one_looks_like(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint at .*; give a folder like runs/"):
        checkpoint.load(tmp_path / "absent")
    with pytest.raises(ValueError, match="no readable manifest.json"):
        checkpoint.load(tmp_path)


def test_a_checkpoint_from_elsewhere_is_one_clear_error(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["spec"]["mechanism"]["name"] = "hyena"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="no mechanism called 'hyena'"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    ("part", "refused"), [("optimizer", None), ("mechanism", r"mechanism\.sc\.impl=triton needs a CUDA device")]
)
def test_only_the_kernels_of_its_model_are_needed_to_load_it(lab, monkeypatch, part, refused):
    folder = lab.train(lab.spec(mechanism={"name": "sc"}, steps=4)).checkpoints()[-1]
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["spec"][part]["impl"] = "triton"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(availability, "find_lacking", lambda device=None, *, interpreted=True: "a CUDA device")
    if refused is None:
        spec, _ = checkpoint.load(folder)
        assert spec.optimizer.settings.impl == "triton"
    else:
        with pytest.raises(ValueError, match=refused):
            checkpoint.load(folder)


def test_code_in_a_checkpoint_is_refused_not_run(folder, tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    (folder / "trainer.pt").write_bytes(pickle.dumps(Evil()))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"]["trainer.pt"] = checkpoint.sha256_of(folder / "trainer.pt")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="cannot be read safely") as caught:
        checkpoint.load_trainer(folder)
    assert "weights_only" not in str(caught.value)  # torch advises to set it to False, which runs the code
    assert not (tmp_path / "ran").exists()


def test_a_failed_write_leaves_nothing_behind(lab, folder, monkeypatch):
    spec, model = checkpoint.load(folder)

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(folder.with_name("step_000005"), model, {}, spec, step=5, data_format=256)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
