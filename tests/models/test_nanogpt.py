"""The presets nanogpt_s, _m and _l are nanoGPT's GPT: as many parameters, the same logits from the same weights, the
same start."""

from __future__ import annotations

import math

import pytest
import torch

from stability.build import build_model
from tests.models.parity import ours, renamed, shaken, twice_in_training
from tests.models.public import nanogpt
from tests.reading import read_spec
from tests.sizes import count_parameters

TINY = nanogpt.Config(block_size=12, vocab_size=29, n_layer=3, n_head=2, n_embd=16)
WORDS = ["position=learned", "norm.layernorm.bias=false", "ffn.bias=false"]


def changes(config: nanogpt.Config, **model) -> dict:
    size = {"layers": config.n_layer, "width": config.n_embd, "heads": config.n_head, "positions": config.block_size}
    own = {"init": "nanogpt", "tied": True, "head_bias": False, "mixer_bias": "all" if config.bias else "none"}
    return {
        "model": {"name": "tiny", **size, **own, **model},
        "objective": "ar",
        "position": "learned",
        "norm": {"name": "layernorm", "bias": config.bias},
        "ffn": {"name": "mlp", "bias": config.bias},
    }


@pytest.mark.parametrize("bias", [False, True])
def test_the_same_weights_give_the_same_logits(bias):
    theirs = shaken(nanogpt.GPT(TINY._replace(bias=bias)))
    model = ours(29, **changes(TINY._replace(bias=bias))).double()
    state = renamed(theirs.state_dict(), nanogpt.NAMES)
    del state["lm_head.weight"]  # the very tensor of the embedding
    model.load_state_dict(state)
    tokens = torch.randint(29, (3, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(tokens)
        assert expected.std() > 0.5
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(model(tokens[:, :5]), theirs(tokens[:, :5]), rtol=0, atol=1e-10)


def test_in_training_mode_the_same_draws_drop_the_same_numbers():
    """After the embedding, at attention's weights and at each branch's output, in this order."""
    theirs = shaken(nanogpt.GPT(TINY._replace(dropout=0.3)))
    model = ours(29, **changes(TINY, dropout=0.3)).double()
    state = renamed(theirs.state_dict(), nanogpt.NAMES)
    del state["lm_head.weight"]
    model.load_state_dict(state)
    tokens = torch.randint(29, (3, 12), generator=torch.Generator().manual_seed(0))
    expected, found = twice_in_training(lambda: theirs.train()(tokens), lambda: model.train()(tokens))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert not torch.allclose(model.eval()(tokens), expected)


@pytest.mark.parametrize(("size", "million"), [("s", 44.6), ("m", 123.6), ("l", 353.6)])
def test_the_presets_have_its_numbers_of_parameters(size, million):
    """As nanoGPT counts them, without positions, with the 50,304 tokens that its vocabulary is filled up to."""
    words = [f"model=nanogpt_{size}", "objective=ar", *WORDS, "mechanism=sa", "lr=1e-3", "seeds=1"]
    (spec,) = read_spec("sweep", words).expand("f" * 64)
    model = spec.model
    config = nanogpt.Config(n_layer=model.layers, n_head=model.heads, n_embd=model.width)
    with torch.device("meta"):
        theirs = nanogpt.GPT(config)
    found = count_parameters(spec, 50304)
    assert found == theirs.get_num_params(non_embedding=False)
    assert round(theirs.get_num_params() / 1e6, 1) == million
    assert round((found - model.positions * model.width) / 1e6, 1) == million


@pytest.mark.parametrize(
    ("study", "size"), [("residuals", "s"), ("residuals_fineweb_edu", "s"), ("attentionx_gpt", "m")]
)
def test_the_papers_presets_train_it_in_bfloat16(study, size):
    """mHC-lite's Tables 1 to 3 and AttentionX's 4.2 are of nanoGPT's own model."""
    for run in read_spec("sweep", [f"study={study}", "lr=1e-3", "seeds=1"]).expand("f" * 64):
        (public,) = read_spec("sweep", ["study=nanogpt", f"model=nanogpt_{size}", "lr=1e-3", "seeds=1"]).expand(
            "f" * 64
        )
        assert run.precision == "bf16"
        assert (run.model, run.position, run.norm, run.ffn) == (public.model, public.position, public.norm, public.ffn)
        if run.residual.name == "identity":
            model = run.model
            with torch.device("meta"):
                sizes = {"n_layer": model.layers, "n_head": model.heads, "n_embd": model.width}
                theirs = nanogpt.GPT(nanogpt.Config(vocab_size=50257, **sizes))
            assert count_parameters(run, 50257) == theirs.get_num_params(non_embedding=False)


def test_weights_start_as_its_code_draws_them():
    """Every parameter has the spread of the public model's, and means of zero; what is constant there is constant."""
    config = TINY._replace(bias=True, n_embd=64, n_layer=2, vocab_size=200, block_size=50)
    torch.manual_seed(0)
    theirs = renamed(nanogpt.GPT(config).state_dict(), nanogpt.NAMES)
    found = ours(200, **changes(config)).state_dict()
    assert set(found) == set(theirs) - {"lm_head.weight"}
    for name, value in found.items():
        assert value.std().item() == pytest.approx(theirs[name].std().item(), rel=0.08, abs=1e-12), name
        assert abs(value.mean() - theirs[name].mean()) < 5 * 0.02 / math.sqrt(value.numel()), name
    assert not torch.equal(found["blocks.0.mixer.qkv.weight"], found["blocks.1.mixer.qkv.weight"])


def test_its_rule_leaves_a_conditioned_models_zeros_alone():
    model = ours(29, model=changes(TINY)["model"] | {"tied": False}, objective="score_entropy")
    assert not any(parameter.any() for parameter in model.head.parameters())
    for block in model.blocks:
        assert not any(parameter.any() for parameter in block.modulation.parameters())
        assert block.ffn.hidden.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_the_same_seed_starts_the_same_model():
    one, two = (ours(29, **changes(TINY)).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    (run,) = read_spec("sweep", ["model=nano", "model.init=nanogpt", "mechanism=sa", "lr=1e-3", "seeds=1"]).expand(
        "f" * 64
    )
    assert build_model(run, 29).embedding.weight.std().item() == pytest.approx(0.02, rel=0.1)
