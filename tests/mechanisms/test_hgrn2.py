"""HGRN2's recurrence against a state carried from position to position; its bounds, which a model holds once."""

from __future__ import annotations

import copy
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.func import functional_call

from stability.build import build_model
from stability.config.parts import part, validate_settings
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.mechanisms.hgrn2 import ExpandedRecurrence
from stability.structure.networks import Stack
from stability.training import checkpoint
from tests.mechanisms import checks
from tests.mechanisms.checks import build_seeded, check_equals_loop, inputs
from tests.mechanisms.decay_loops import before_norm, carried, mapped, scaled, sigmoid, swish
from tests.mechanisms.fla_naive import fla_naive


def module(layer=2, num_layers=4, **settings):
    config, shape = validate_settings("mechanisms", "hgrn2", settings), MixerShape(16, 2, "causal", layer, num_layers)
    mixer = build_seeded(lambda: ExpandedRecurrence.build(config, shape)).double()
    with torch.no_grad():
        mixer.norm.weight.add_(torch.linspace(-0.5, 0.5, 16))
        mixer.forget.weight.mul_(4)
        mixer.forget.bias.add_(torch.linspace(-2, 2, len(mixer.forget.bias)))
        if mixer.bounds is not None:
            draws = torch.randn(mixer.bounds.logit_LK.shape, generator=torch.Generator().manual_seed(4))
            mixer.bounds.logit_LK.copy_(2 * draws)
    return mixer


def bound_by_sums(mixer, feature):
    """lb of a feature: e^Γ of the layers 1 … l over that of all."""
    if mixer.bounds is None:
        return mixer.layer / mixer.num_layers
    shares = [math.exp(row) for row in mixer.bounds.logit_LK[:, feature].tolist()]
    return sum(shares[1 : mixer.layer + 1]) / sum(shares)


def by_loops(mixer, x_ND, valid_N):
    """One sequence's output: S ← Diag(f) S + (1 − f) iᵀ, f = lb + (1 − lb) σ(·)."""
    of_keys = len(mixer.forget.bias)
    q, v = (mapped(mixer.qi, x_ND, first, rows) for first, rows in ((0, of_keys), (of_keys, 16)))
    scores = mapped(mixer.forget, x_ND, 0, of_keys)
    bounds = [bound_by_sums(mixer, feature) for feature in range(of_keys)]
    f = torch.tensor(
        [[lb + (1 - lb) * sigmoid(score) for lb, score in zip(bounds, row, strict=True)] for row in scores.tolist()],
        dtype=torch.float64,
    )
    read = torch.zeros_like(v)
    for head in range(2):
        keys, own = slice(of_keys // 2 * head, of_keys // 2 * (head + 1)), slice(8 * head, 8 * head + 8)
        q_NK = torch.stack([swish(row) for row in q[:, keys]])
        read[:, own] = carried(q_NK, 1 - f[:, keys], v[:, own], lambda n: f[n, keys].tolist(), valid_N)  # noqa: B023
    normed = torch.stack([scaled(row, mixer.norm.weight, centred=False) for row in read])
    return normed @ mixer.out.weight.T + mixer.out.bias


@pytest.mark.parametrize("settings", [{}, {"bounds": "fixed"}, {"expand_k": 0.5}])
@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("num_positions", [1, 9, 27])
def test_equals_the_recurrence_position_by_position(num_positions, layer, settings):
    mixer = module(layer, chunk=4, **settings)
    check_equals_loop(mixer, partial(by_loops, mixer), num_positions)


def test_equals_the_public_recurrence():
    """That of flash-linear-attention's gated linear attention, in float32, with f for its decay; it scales queries by
    1/√K, which HGRN2 does not."""
    mixer, x_BND = module(bounds="fixed", chunk=4).float(), inputs(torch.float32, num_positions=27)
    with torch.no_grad():
        q, v = (part.unflatten(-1, (2, -1)) for part in mixer.qi(x_BND).chunk(2, -1))
        f = 0.5 + 0.5 * mixer.forget(x_BND).sigmoid().unflatten(-1, (2, -1))
        expected, _ = fla_naive("gla").naive_recurrent_gla(
            torch.nn.functional.silu(q) * math.sqrt(8), 1 - f, v, f.log()
        )
        found = before_norm(mixer, x_BND).unflatten(-1, (2, -1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_bounds_rise_with_depth_from_zero_and_begin_at_the_share_of_the_layer():
    for layer in range(1, 5):
        mixer = build("hgrn2", width=16, heads=2, direction="causal", layer=layer, num_layers=5)
        fixed = build("hgrn2", width=16, heads=2, direction="causal", layer=layer, num_layers=5, bounds="fixed")
        for given in (mixer, fixed):
            lb, rest = (part.exp() for part in given.log_bounds(torch.zeros(2, 16)))
            torch.testing.assert_close(lb, torch.full((16,), layer / 5), rtol=1e-6, atol=0)
            torch.testing.assert_close(rest, torch.full((16,), 1 - layer / 5), rtol=1e-6, atol=0)
        assert fixed.bounds is None
    drawn = module(1, 5).bounds
    bounds = torch.stack([drawn(layer)[0].exp() for layer in range(1, 5)])
    assert (bounds.diff(dim=0) > 0).all() and (bounds < 1).all()
    assert build("hgrn2", width=16, heads=2, direction="causal", layer=0, num_layers=5).bounds is None


@pytest.mark.parametrize("layer", [0, 3])
def test_gates_are_exact_where_nearly_all_or_nearly_nothing_is_kept(layer):
    """1 − f of 1e-30 and f of 1e-30 are there in float32, where 1 − (1 − f) would be 0, and its logarithm −inf; with a
    bound ln f is off by a rounding of 1."""
    mixer = module(layer).float()
    # ln lb and ln(1 − lb) are differences of two log-sums as large as the logits, each rounded by half a unit of that; and
    # each log-sum's exp, sum and log, and the last one's, by ten halves of a unit of 1
    largest = float(mixer.bounds.logit_LK.detach().abs().max()) if layer else 0.0
    rounding = torch.finfo(torch.float32).eps * (largest + 5)
    with torch.no_grad():
        mixer.forget.weight.zero_()
        for score in (-70.0, -20.0, 0.0, 20.0, 70.0):
            mixer.forget.bias.fill_(score)
            log_f, taken = mixer.gates(torch.zeros(1, 1, 16))
            bounds = [bound_by_sums(mixer, feature) if layer else 0.0 for feature in range(16)]
            exact = [(1 - lb) * sigmoid(-score) for lb in bounds]
            torch.testing.assert_close(taken.flatten(), torch.tensor(exact), rtol=1e-5, atol=0)
            logs = [
                math.log(lb + (1 - lb) * sigmoid(score)) if x > 1e-9 else -x
                for lb, x in zip(bounds, exact, strict=True)
            ]
            torch.testing.assert_close(log_f.flatten(), torch.tensor(logs), rtol=1e-5, atol=rounding if layer else 0)


def test_bounds_that_reach_their_ends_keep_finite_derivatives():
    mixer = module().float()
    with torch.no_grad():
        mixer.bounds.logit_LK[:2] = -200.0
        mixer.bounds.logit_LK[2:, ::2] = -300.0
        mixer.forget.bias.fill_(-150.0)
    leaves = list(mixer.parameters())
    gradients = torch.autograd.grad(mixer(inputs(torch.float32)).square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), leaves)
    assert all(tensor.isfinite().all() for tensor in (*gradients, *second))


def spec_of(lab, mechanism=None, layers=3, **changes):
    size = {"name": "x", "layers": layers, "width": 16, "heads": 2, "positions": 16}
    values = {"objective": "ar", "mechanism": mechanism or {"name": "hgrn2", "chunk": 4}, "model": size}
    return lab.spec(**{**values, **changes})


def drawn_bounds(model):
    (owner,) = [name for name, _ in model.named_parameters() if name.endswith("logit_LK")]
    with torch.no_grad():
        model.get_parameter(owner).copy_(torch.randn(model.get_parameter(owner).shape))
    return owner, model.get_parameter(owner)


def test_a_model_holds_one_parameter_that_all_its_layers_read(lab):
    model = build_model(spec_of(lab), 8)
    owner, value = drawn_bounds(model)
    assert owner == "blocks.1.mixer.bounds.logit_LK" and value.shape == (3, 16)
    assert [name for name in model.state_dict() if "logit" in name] == [owner]
    for layer in (1, 2):
        shares = torch.softmax(value.double(), 0)[1 : layer + 1].sum(0)
        torch.testing.assert_close(
            model.blocks[layer].mixer.bounds(layer)[0].double(), shares.log(), rtol=1e-5, atol=1e-6
        )


def test_a_copy_a_saved_state_and_lent_parameters_reach_every_layer(lab):
    spec, tokens_BN = spec_of(lab), torch.randint(8, (2, 9), generator=torch.Generator().manual_seed(0))
    model = build_model(spec, 8)
    plain = model(tokens_BN)
    owner, _ = drawn_bounds(model)
    expected = model(tokens_BN)
    assert not torch.allclose(expected, plain)
    assert torch.equal(copy.deepcopy(model)(tokens_BN), expected)
    other = build_model(spec, 8)
    assert torch.equal(functional_call(other, {owner: model.get_parameter(owner)}, (tokens_BN,)), expected)
    assert torch.equal(other(tokens_BN), plain), "what was lent stayed"
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other(tokens_BN), expected)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.get_parameter(owner).zero_()
    assert torch.equal(model(tokens_BN), expected) and not torch.allclose(copied(tokens_BN), expected)


def test_each_layer_adds_to_the_gradient_of_the_bounds(lab):
    """Γ's last row moves all bounds; with the last layer's output gone it has another gradient."""
    model, tokens_BN = build_model(spec_of(lab), 8), torch.arange(9)[None] % 8
    owner, value = drawn_bounds(model)
    whole = torch.autograd.grad(model(tokens_BN).square().sum(), value)[0]
    with torch.no_grad():
        model.blocks[2].mixer.out.weight.zero_()
    less = torch.autograd.grad(model(tokens_BN).square().sum(), value)[0]
    assert whole.any() and less.any() and not torch.allclose(whole, less)


@pytest.mark.parametrize(
    ("mechanism", "objective", "owners"),
    [
        ({"name": "mix", "pattern": ["hgrn2", "sa"], "order": "cycled"}, "ar", ["blocks.2.mixer.bounds"]),
        ({"name": "two_way", "of": "hgrn2"}, "mlm", ["blocks.1.mixer.mixers.0.bounds"]),
        ({"name": "two_way", "of": "hgrn2", "weights": "shared"}, "mlm", ["blocks.1.mixer.mixers.0.bounds"]),
        ({"name": "hgrn2", "bounds": "fixed"}, "ar", []),
    ],
)
def test_patterns_and_both_directions_hold_it_once_too(lab, mechanism, objective, owners):
    model = build_model(spec_of(lab, mechanism, layers=4, objective=objective), 8)
    found = [name for name, _ in model.named_parameters() if "bounds" in name]
    assert found == [f"{owner}.logit_LK" for owner in owners]
    assert len(model.state_dict()) == len({value.data_ptr() for value in model.state_dict().values()})


def test_a_stack_of_the_tokenizer_holds_it_once_too():
    names = {"mechanism": {"name": "two_way", "of": "hgrn2"}, "norm": {"name": "layernorm"}, "ffn": {"name": "mlp"}}
    parts: Any = {key: part(f"{key}s", value) for key, value in names.items()}
    spec: Any = SimpleNamespace(ffn_multiple=2, **parts)
    size: Any = SimpleNamespace(layers=3, width=16, heads=2)
    assert [name for name, _ in Stack(spec, size).named_parameters() if "bounds" in name] == [
        "blocks.1.mixer.mixers.0.bounds.logit_LK"
    ]


@pytest.mark.parametrize("name", ["gla", "hgrn2"])
def test_a_model_without_biases_keeps_those_of_the_gates(lab, name):
    size = {"name": "x", "layers": 2, "width": 16, "heads": 2, "positions": 16, "mixer_bias": "none"}
    for block in build_model(spec_of(lab, {"name": name}, model=size), 8).blocks:
        biases = [key for key, _ in block.mixer.named_parameters() if key.endswith("bias")]
        assert biases == ["forget.bias"]


def test_a_run_trains_the_bounds_and_its_checkpoint_holds_them(lab):
    directory = lab.train(spec_of(lab, steps=4, lr_peak=0.1))
    (folder,) = directory.checkpoints()[-1:]
    bounds = {name: value for name, value in checkpoint.load(folder)[1].state_dict().items() if "bounds" in name}
    assert list(bounds) == ["blocks.1.mixer.bounds.logit_LK"] and bounds["blocks.1.mixer.bounds.logit_LK"].any()


@pytest.mark.parametrize(("settings", "expected"), [({}, 4), ({"expand_k": 0.5}, 3)])
def test_widths_are_as_declared(settings, expected):
    mixer, config = module(**settings), validate_settings("mechanisms", "hgrn2", settings)
    matrices = (mixer.qi.weight, mixer.forget.weight, mixer.out.weight)
    assert sum(value.numel() for value in matrices) == expected * 16 * 16
    assert sum(mixer.own_splits["qi"]) == mixer.qi.out_features
    of_keys = len(mixer.forget.bias)
    assert ExpandedRecurrence.state_size(config, MixerShape(16, 2, "causal"), 99) == of_keys * 8


@pytest.mark.parametrize("settings", [{}, {"bounds": "fixed", "expand_k": 0.5}])
def test_a_layer_with_bounds_keeps_the_contract(settings):
    for check in (
        checks.check_padding_is_unread,
        checks.check_wholly_padded_is_finite,
        checks.check_second_derivatives,
        checks.check_degenerate_inputs,
        checks.check_future_is_unseen,
        checks.check_every_parameter_is_trained,
    ):
        check(module(chunk=2, **settings))
    checks.check_own_init_stays(lambda: module(**settings))
    expected = {"forget.bias": False} | ({} if settings else {"bounds.logit_LK": False})
    checks.check_own_decay(module(**settings), expected)


def test_in_bfloat16_gates_and_state_are_those_of_float32():
    mixer, x_BND = module().float(), inputs(torch.float32, num_positions=60)
    expected = mixer.gates(x_BND)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(*pair) for pair in zip(mixer.gates(x_BND), expected, strict=True))
        assert before_norm(mixer, x_BND).dtype == torch.float32
        y_BND = mixer(x_BND)
    torch.testing.assert_close(y_BND.float(), mixer(x_BND), rtol=0, atol=0.1)
