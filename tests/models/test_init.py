"""How token embeddings start: `model.embedding_std` times what is drawn anyway."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from stability.build import build_model
from stability.config.identity import run_id
from stability.config.parse import parse_run
from tests.objectives.test_multitrack import SIZES, run_spec
from tests.reading import read_spec
from tests.sizes import with_slow

VOCAB = 256


def with_std(spec, std):
    return spec.model_copy(update={"model": spec.model.model_copy(update={"embedding_std": std})})


def test_token_embeddings_start_with_the_standard_deviation_that_is_asked_for_and_all_else_as_ever(lab):
    spec = lab.spec(mechanism={"name": "mix"})
    plain, small = (build_model(each, VOCAB).state_dict() for each in (spec, with_std(spec, 0.02)))
    assert plain["embedding.weight"].std().item() == pytest.approx(1, rel=0.05)
    assert small["embedding.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(small["embedding.weight"], plain["embedding.weight"] * 0.02)
    assert [key for key in plain if not torch.equal(plain[key], small[key])] == ["embedding.weight"]


def test_at_one_the_tokens_start_as_torch_draws_them(lab, monkeypatch):
    """As before there was the setting, bit for bit: with the scaling taken out nothing changes."""
    ours = build_model(lab.spec(), VOCAB).state_dict()
    scale, scaled = torch.Tensor.mul_, []

    def unless_an_embedding(tensor, factor):
        if tensor.shape == (VOCAB + 1, 16):
            scaled.append(factor)
            return tensor
        return scale(tensor, factor)

    monkeypatch.setattr(torch.Tensor, "mul_", unless_an_embedding)
    plain = build_model(lab.spec(), VOCAB).state_dict()
    assert scaled == [1.0]
    assert all(torch.equal(ours[key], plain[key]) for key in plain)


def test_every_track_of_proteins_starts_so_and_positions_and_patches_do_not():
    plain, small = (build_model(with_std(run_spec(), std), SIZES) for std in (1.0, 0.5))
    tables = {name for name, module in plain.named_modules() if isinstance(module, nn.Embedding)}
    assert len(tables) >= 3
    before, after = plain.state_dict(), small.state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {f"{name}.weight" for name in tables}
    assert all(torch.equal(after[key], before[key] * 0.5) for key in changed)


@pytest.mark.parametrize("model", with_slow(["nano", "vit_nano"], ["text_54m", "gpt_s"]))
def test_it_is_set_on_the_command_line_whatever_the_size(model):
    words = [f"model={model}", "model.embedding_std=0.02", "mechanism=sa", "lr=1e-3", "seeds=1"]
    (run,) = read_spec("sweep", words).expand("f" * 64)
    assert run.model.embedding_std == 0.02
    (plain,) = read_spec("sweep", [word for word in words if "std" not in word]).expand("f" * 64)
    (one,) = read_spec("sweep", [*words[:1], *words[2:], "model.embedding_std=1.0"]).expand("f" * 64)
    assert run_id(plain) == run_id(one) != run_id(run)
    assert read_spec("sweep", [f"model={model}", "model.qk_bias=1.5", "model.ffn_multiple=2"]).model.qk_bias == 1.5


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_it_is_a_positive_number(lab, value):
    values = lab.spec().model_dump(mode="json")
    with pytest.raises(ValueError, match="model.embedding_std"):
        parse_run(values | {"model": {**values["model"], "embedding_std": value}})
