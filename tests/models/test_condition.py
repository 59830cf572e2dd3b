"""Time-conditioned blocks: the identity at the start, adaLN's formula afterwards, and who may be given a noise
level."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from stability.build import build_model
from stability.models.condition import ConditionShape, NoiseLevel, sinusoids
from stability.registry import Registry

V = 11
REGISTRY = Registry("mechanisms")
MECHANISMS = [  # score_entropy reads both sides
    name
    for name in REGISTRY.names(cross=False, trainable=True)
    if "bidirectional" in REGISTRY.load(name).supported_directions(REGISTRY.load(name).Config())
]


def conditioned(lab, **changes):
    return build_model(lab.spec(**{"objective": {"name": "score_entropy"}, **changes}), V).double()


def shaken(model, size=0.1):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(size * torch.randn(param.shape, generator=generator, dtype=torch.float64))
    return model


def tokens():
    return torch.randint(V, (2, 16), generator=torch.Generator().manual_seed(1))


SIGMA = torch.tensor([0.1, 3.0], dtype=torch.float64)


def test_sinusoids_are_cosines_then_sines_of_falling_frequency():
    expected = [[f(s * 10_000 ** (-k / 128)) for f in (math.cos, math.sin) for k in range(128)] for s in SIGMA.tolist()]
    torch.testing.assert_close(sinusoids(SIGMA, 256), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_noise_level_passes_two_layers():
    level = NoiseLevel(ConditionShape(5, 6)).double()
    silu = nn.functional.silu
    expected = silu(
        silu(sinusoids(SIGMA, 6) @ level.hidden.weight.T + level.hidden.bias) @ level.condition.weight.T
        + level.condition.bias
    )
    torch.testing.assert_close(level(SIGMA), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_blocks_start_as_the_identity_and_the_head_at_zero(lab, mechanism, norm):
    model = conditioned(lab, mechanism={"name": mechanism}, norm=norm)
    hidden = model(tokens(), sigma_B=SIGMA, readout=lambda hidden_BND, weight, bias: hidden_BND)
    assert torch.equal(hidden, model.final_norm(model.embedding(tokens())))
    assert not model(tokens(), sigma_B=SIGMA).any()
    assert model.blocks[0].mixer.state_dict().keys(), "the branches themselves are there"
    assert any(param.any() for param in model.blocks[0].mixer.parameters())


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_each_sequence_is_modulated_by_its_own_noise_level(lab, mechanism, norm):
    model = shaken(conditioned(lab, mechanism={"name": mechanism}, norm=norm))
    whole = model(tokens(), sigma_B=SIGMA)
    for row in range(2):
        torch.testing.assert_close(
            model(tokens()[row : row + 1], sigma_B=SIGMA[row : row + 1])[0], whole[row], rtol=0, atol=1e-12
        )
    assert not torch.allclose(model(tokens(), sigma_B=SIGMA + 0.5), whole)


def test_a_modulated_block_follows_the_formula_of_adaln(lab):
    """x + g₁·mixer(norm(x)(1 + c₁) + s₁), then the same with the feed-forward branch; shift, scale, gate from six
    chunks; the final norm has two."""
    model = shaken(conditioned(lab))
    condition = model.noise_level(SIGMA)
    x = model.embedding(tokens())
    for block in model.blocks:
        linear = block.modulation.chunks
        s1, c1, g1, s2, c2, g2 = (
            (condition @ linear.weight.T + linear.bias)[:, 16 * k : 16 * (k + 1)].reshape(2, 1, 16) for k in range(6)
        )
        x = x + g1 * block.mixer(block.mixer_norm(x) * (1 + c1) + s1)
        x = x + g2 * block.ffn(block.ffn_norm(x) * (1 + c2) + s2)
    linear = model.final_modulation.chunks
    shift, scale = (
        (condition @ linear.weight.T + linear.bias)[:, 16 * k : 16 * (k + 1)].reshape(2, 1, 16) for k in range(2)
    )
    expected = model.head(model.final_norm(x) * (1 + scale) + shift)
    torch.testing.assert_close(model(tokens(), sigma_B=SIGMA), expected, rtol=0, atol=1e-12)


def test_at_the_start_only_what_lies_behind_the_zeros_has_a_gradient(lab):
    """The head's; then, once it has moved, the gates' as well."""
    model = conditioned(lab)
    targets = torch.randn(2, 16, V, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def moving():
        model.zero_grad()
        (model(tokens(), sigma_B=SIGMA) - targets).square().sum().backward()
        return {
            name.split(".")[0]
            for name, param in model.named_parameters()
            if param.grad is not None and param.grad.any()
        }

    assert moving() == {"head"}
    with torch.no_grad():
        model.head.weight.sub_(1e-2 * model.head.weight.grad)
    assert {"head", "embedding", "blocks", "final_norm", "final_modulation"} == moving()


def test_a_noise_level_is_needed_exactly_where_it_is_read(lab):
    with pytest.raises(ValueError, match=r"reads? the noise level; give sigma_B="):
        conditioned(lab)(tokens())
    with pytest.raises(ValueError, match="this model has none; its objective has no noise level"):
        build_model(lab.spec(), V)(tokens(), sigma_B=SIGMA)


def test_an_unconditioned_model_has_no_parameters_for_it(lab):
    names = [name for name, _ in build_model(lab.spec(), V).named_parameters()]
    assert not any("modulation" in name or "noise" in name for name in names)
    width, condition, layers = 16, 128, 2
    # the mask's row
    extra = (
        (256 * condition + condition) + (condition**2 + condition) + (layers * 6 + 2) * width * (condition + 1) + width
    )
    plain = build_model(lab.spec(objective={"name": "ar"}), V)
    assert sum(p.numel() for p in conditioned(lab).parameters()) == sum(p.numel() for p in plain.parameters()) + extra
