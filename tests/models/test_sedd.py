"""The presets sedd_small and sedd_medium are SEDD's DDiT: the same scores from the same weights, as many parameters, the
same start.

Its head has one more row, the mask's own, which neither its loss nor its sampling reads: ours has none.
"""

from __future__ import annotations

import math

import pytest
import torch

from stability.build import build_objective
from tests.models.parity import ours, renamed, shaken, spec_of, twice_in_training
from tests.models.public import sedd
from tests.reading import read_spec
from tests.sizes import count_parameters

TOKENS = 29
SIGMA = torch.tensor([0.03, 0.7, 6.0], dtype=torch.float64)
CHANGES = {
    "model": {
        "name": "tiny",
        "layers": 3,
        "width": 16,
        "heads": 2,
        "positions": 12,
        "init": "sedd",
        "mixer_bias": "none",
    },
    "objective": {"name": "score_entropy", "condition_width": 10},
    "norm": {"name": "layernorm", "bias": False},
    "ffn": {"name": "mlp", "activation": "gelu_tanh"},
}
WORDS = ["objective=score_entropy", "norm.layernorm.bias=false", "ffn.activation=gelu_tanh", "mechanism=sa"]


def theirs(width=16, **changes):
    return sedd.SEDD(TOKENS, hidden_size=width, n_blocks=3, n_heads=2, cond_dim=10, **changes)


def without_the_masks_row(state):
    return {name: value[:TOKENS] if name.startswith("head.") else value for name, value in state.items()}


def test_the_same_weights_give_the_same_scores():
    public = shaken(theirs())
    model = ours(TOKENS, **CHANGES).double()
    model.load_state_dict(without_the_masks_row(renamed(public.state_dict(), sedd.NAMES)))
    generator = torch.Generator().manual_seed(0)
    noisy = torch.randint(TOKENS, (3, 12), generator=generator)
    noisy[torch.rand(3, 12, generator=generator) < 0.5] = TOKENS
    with torch.no_grad():
        expected = public.network(noisy, SIGMA)[..., :TOKENS]
        assert expected.std() > 0.5
        torch.testing.assert_close(model(noisy, sigma_B=SIGMA), expected, rtol=0, atol=1e-10)
        scores = build_objective(spec_of(**CHANGES), TOKENS).log_score(model, noisy, SIGMA)
        masked = noisy == TOKENS
        torch.testing.assert_close(scores[masked], public(noisy, SIGMA)[masked], rtol=0, atol=1e-10)


def test_in_training_mode_the_same_draws_drop_the_same_numbers():
    """At each branch's output, before its gate, and nowhere else."""
    public = shaken(theirs(dropout=0.3))
    size = CHANGES["model"] | {"dropout": 0.3, "dropout_at": "branches"}
    model = ours(TOKENS, **CHANGES | {"model": size}).double()
    model.load_state_dict(without_the_masks_row(renamed(public.state_dict(), sedd.NAMES)))
    noisy = torch.randint(TOKENS + 1, (3, 12), generator=torch.Generator().manual_seed(0))
    expected, found = twice_in_training(
        lambda: public.train().network(noisy, SIGMA)[..., :TOKENS], lambda: model.train()(noisy, sigma_B=SIGMA)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert not torch.allclose(model.eval()(noisy, sigma_B=SIGMA), expected)


@pytest.mark.parametrize("size", ["small", "medium"])
def test_the_presets_have_its_numbers_of_parameters(size):
    (spec,) = read_spec("sweep", [f"model=sedd_{size}", *WORDS, "lr=1e-3", "seeds=1"]).expand("f" * 64)
    shape = {"small": (768, 12, 12), "medium": (1024, 24, 16)}[size]
    assert (spec.model.width, spec.model.layers, spec.model.heads) == shape
    with torch.device("meta"):
        public = sedd.SEDD(50257, *shape)
    masks_row = spec.model.width + 1
    assert count_parameters(spec, 50257) + masks_row == sum(value.numel() for value in public.parameters())


def details(run):
    """The settings that make a network SEDD's, whatever its size and mechanism."""
    return run.model.model_dump(include={"init", "mixer_bias", "dropout", "dropout_at"}), run.norm, run.ffn


@pytest.mark.parametrize("size", ["text_54m", "text_193m", "text_385m", "dna_51m", "dna_172m", "dna_331m"])
def test_the_consensus_papers_presets_are_its_network(size):
    """Of masks nothing is said to the blocks: DNA has its details, text its parameters as well."""
    (public,) = read_spec("sweep", ["study=sedd", "lr=1e-3", "seeds=1"]).expand("f" * 64)
    for run in read_spec("sweep", [f"study={size}", "lr=1e-3"]).expand("f" * 64):
        assert details(run) == details(public)
        if run.mechanism.name == "sa" and size.startswith("text"):
            with torch.device("meta"):
                theirs = sedd.SEDD(50257, run.model.width, run.model.layers, run.model.heads)
            masks_row = run.model.width + 1
            assert count_parameters(run, 50257) + masks_row == sum(value.numel() for value in theirs.parameters())


@pytest.mark.parametrize("study", ["text_385m_mix", "ablation_consensus_193m"])
def test_so_are_those_of_one_mechanism(study):
    (public,) = read_spec("sweep", ["study=sedd", "lr=1e-3", "seeds=1"]).expand("f" * 64)
    runs = read_spec("sweep", [f"study={study}", "lr=1e-4"]).expand("f" * 64)
    assert all(details(run) == details(public) for run in runs)


def test_weights_start_as_its_code_draws_them():
    torch.manual_seed(0)
    public = without_the_masks_row(renamed(theirs(64).state_dict(), sedd.NAMES))
    found = ours(TOKENS, **CHANGES | {"model": CHANGES["model"] | {"width": 64}}).state_dict()
    assert set(found) == set(public)
    for name, value in found.items():
        expected = public[name]
        if expected.numel() < 2 or not expected.std():
            assert torch.equal(value, expected), name
            continue
        assert value.std().item() == pytest.approx(expected.std().item(), rel=max(0.06, 4 / math.sqrt(value.numel())))
        assert value.abs().max().item() == pytest.approx(expected.abs().max().item(), rel=0.1), name
    assert found["embedding.weight"].std().item() == pytest.approx(1 / math.sqrt(3 * 64), rel=0.03)
    assert not found["head.weight"].any()
    assert not found["head.bias"].any()
    assert found["blocks.0.ffn.hidden.bias"].any()


def test_the_head_of_another_objective_starts_at_zero_too():
    model = ours(TOKENS, model=CHANGES["model"], objective="mlm")
    assert not any(parameter.any() for parameter in model.head.parameters())
