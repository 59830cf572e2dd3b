"""Every registered kind of linear map keeps the contract, in every mechanism that calls its maps; bitnet is held to its
formulas in slow loops, its gradients to the straight-through estimator written out."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from stability.build import build_model
from stability.config.identity import essence
from stability.config.parse import parse_run
from stability.config.parts import validate_settings
from stability.curvature import directional
from stability.ffns import build as build_ffn
from stability.linears import replace_linears
from stability.mechanisms import build as build_mechanism
from stability.models.block import split_loss
from stability.registry import Registry
from tests.changes import other_values, settings_of_family
from tests.identity.golden_ids import BASE
from tests.reading import read_spec

NAMES = Registry("linears").names()
MECHANISMS = Registry("mechanisms")


def made(name: str, dense: nn.Linear, **settings) -> nn.Linear:
    return Registry("linears").load(name).of(validate_settings("linears", name, settings), dense)


def a_map(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 4, bias=bias).double()


def inputs() -> torch.Tensor:
    return torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_the_parameters_that_were_there_and_draws_nothing(name):
    dense = a_map()
    before = torch.random.get_rng_state()
    kind = made(name, dense)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert isinstance(kind, nn.Linear) and kind.weight is dense.weight and kind.bias is dense.bias
    assert set(kind.state_dict()) == {"weight", "bias"}
    assert set(made(name, a_map(bias=False)).state_dict()) == {"weight"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_shape_and_dtype_stay_and_no_position_reads_another(name, dtype):
    kind = made(name, a_map().to(dtype))
    y_BND = kind(inputs().to(dtype))
    assert (y_BND.shape, y_BND.dtype) == ((2, 5, 4), dtype)
    alone = torch.stack([kind(inputs().to(dtype)[:, position]) for position in range(5)], 1)
    torch.testing.assert_close(y_BND, alone)


@pytest.mark.parametrize(("name", "key"), settings_of_family("linears"))
def test_every_setting_changes_what_the_map_gives(name, key):
    usual = made(name, a_map())(inputs())
    for value in other_values("linears", name, key):
        assert not torch.equal(made(name, a_map(), **{key: value})(inputs()), usual), (key, value)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("bits", [8, 3])
def test_bitnet_is_its_formula(bits, norm):
    dense = a_map()
    weight, bias = dense.weight.tolist(), dense.bias.tolist()
    gamma = math.fsum(abs(w) for row in weight for w in row) / 24
    ternary = [[gamma * max(-1, min(1, round(w / gamma))) for w in row] for row in weight]
    assert {round(w / gamma) for row in ternary for w in row} == {-1, 0, 1}
    for x, found in zip(
        inputs().flatten(0, 1).tolist(),
        made("bitnet", dense, bits=bits, norm=norm)(inputs()).flatten(0, 1),
        strict=True,
    ):
        scale = math.sqrt(math.fsum(value**2 for value in x) / 6 + 1e-5) if norm else 1.0
        u = [value / scale for value in x]
        unit = max(abs(value) for value in u) / (2 ** (bits - 1) - 1)
        u = [unit * round(value / unit) for value in u]
        expected = [
            math.fsum(w * value for w, value in zip(row, u, strict=True)) + b
            for row, b in zip(ternary, bias, strict=True)
        ]
        assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_gradients_are_those_of_the_map_with_its_roundings_held_fixed():
    dense, x = a_map(), inputs().requires_grad_()
    kind = made("bitnet", dense, bits=4)
    push = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad((kind(x) * push).sum(), (x, dense.weight, dense.bias))
    with torch.no_grad():  # g ⊗ x̃ for W; for x the norm's own derivative of W̃ᵀg, by a loop over entries
        gamma = dense.weight.abs().mean()
        ternary = gamma * (dense.weight / gamma).round().clamp(-1, 1)
        rms = (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        unit = (x / rms).abs().amax(-1, keepdim=True) / 7
        rounded = (x / rms / unit).round() * unit
        of_weight = torch.zeros_like(dense.weight)
        of_x = torch.zeros_like(x)
        for b in range(2):
            for n in range(5):
                of_weight += push[b, n][:, None] * rounded[b, n]
                jacobian = torch.eye(6, dtype=torch.float64) / rms[b, n] - x[b, n][:, None] * x[b, n] / (
                    6 * rms[b, n] ** 3
                )
                of_x[b, n] = jacobian @ (ternary.T @ push[b, n])
    for one, two in zip(found, (of_x, of_weight, push.sum((0, 1))), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


def test_a_direction_s_curvature_is_that_of_the_surrogate():
    """The Taylor rules refuse what is detached; double backward differentiates the function with its roundings fixed."""
    dense = a_map()
    kind, x = made("bitnet", dense, norm=False), inputs()
    params = {key: value.detach() for key, value in kind.named_parameters()}
    direction = {
        key: torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(3))
        for key, p in params.items()
    }
    found = directional(lambda p: torch.func.functional_call(kind, p, (x,)).sin().sum(), params, direction)
    assert found.method == "double_backward"
    with torch.no_grad():
        fixed, rounded = kind.ternary() - dense.weight, kind._round(x)

    def held(t: float) -> float:
        weight, bias = (params[key] + t * direction[key] for key in ("weight", "bias"))
        return float(nn.functional.linear(rounded, weight + fixed, bias).sin().sum())

    step = 1e-3
    second = (-held(2 * step) + 16 * held(step) - 30 * held(0) + 16 * held(-step) - held(-2 * step)) / (12 * step**2)
    assert found.curvature == pytest.approx(second, rel=1e-5)


@pytest.mark.parametrize("name", [name for name in MECHANISMS.names() if name != "mix"])
def test_a_mechanism_that_says_so_calls_every_one_of_its_linear_maps(name):
    mechanism = MECHANISMS.load(name)
    direction = "bidirectional" if mechanism.cross or "bidirectional" in mechanism.directions else "causal"
    layer = build_mechanism(name, width=16, heads=2, direction=direction)
    maps = {key: module for key, module in layer.named_modules() if isinstance(module, nn.Linear)}
    called = set()
    for key, module in maps.items():
        module.register_forward_hook(lambda *_, key=key: called.add(key))
    layer(torch.randn(2, 9, 16), *([torch.randn(2, 7, 16)] if mechanism.cross else []))
    assert (called == set(maps)) is mechanism.calls_linears(mechanism.Config())


@pytest.mark.parametrize("name", Registry("ffns").names())
def test_every_feed_forward_network_calls_its_linear_maps(name):
    """All but a router, whose choice rounding would change."""
    ffn = build_ffn(name, width=16)
    usual = split_loss(ffn(torch.ones(1, 2, 16)), [])
    kind = Registry("linears").load("bitnet")
    replace_linears(ffn, kind, kind.Config())
    maps = {type(module).__name__ for module in ffn.modules() if list(module.parameters(recurse=False))}
    assert maps - {"Router"} == {"BitLinear"} and ("Router" in maps) is (name == "moe")
    assert not torch.allclose(split_loss(ffn(torch.ones(1, 2, 16)), []), usual)


def test_a_model_has_them_in_mixers_and_feed_forward_networks_alone(lab):
    spec = {"mechanism": "sa", "objective": {"name": "mlm", "context": 4}, "cross": "ca"}
    dense, model = (build_model(lab.spec(linear=name, **spec), 8) for name in ("dense", "bitnet"))
    for (key, one), (other, two) in zip(dense.state_dict().items(), model.state_dict().items(), strict=True):
        assert key == other and torch.equal(one, two)
    found = {key for key, module in model.named_modules() if type(module).__name__ == "BitLinear"}
    assert found == {
        key
        for key, module in dense.named_modules()
        if isinstance(module, nn.Linear) and any(part in key for part in (".mixer.", ".ffn.", ".cross."))
    }
    assert {key.rsplit(".", 1)[-1] for key in found} == {"qkv", "out", "hidden", "q", "kv"}
    assert type(model.head) is nn.Linear


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"mechanism": "sc"}, "mechanism=sc"),
        ({"mechanism": "mix"}, "mechanism=mix"),
        ({"mechanism": "sa", "objective": {"name": "mlm", "context": 4}, "cross": "cc"}, "cross=cc"),
    ],
)
def test_a_mechanism_that_takes_the_weights_itself_is_refused(changes, what):
    with pytest.raises(ValueError, match=f"linear=bitnet would have no effect: {what} multiplies") as caught:
        parse_run(BASE | changes | {"linear": "bitnet"})
    assert len(str(caught.value).splitlines()) == 1
    assert parse_run(BASE | changes | {"linear": "dense"}).linear.name == "dense"


def test_it_is_chosen_on_the_command_line_and_today_s_is_not_in_an_id():
    spec = read_spec("sweep", ["linear=bitnet", "linear.bits=6", "mechanism=sa"])
    assert (spec.linear.name, spec.linear.settings.bits) == ("bitnet", 6)
    sa = BASE | {"mechanism": "sa"}
    assert "linear" not in json.loads(essence(parse_run(sa)))
    found = json.loads(essence(parse_run(sa | {"linear": "bitnet"})))["linear"]
    assert found == {"name": "bitnet", "bits": 8, "norm": True}


PLUGIN = """
from torch import nn
from stability.config import Settings
from stability.linears import AbstractLinear

class Signed(nn.Linear):
    def __init__(self, dense):
        super().__init__(dense.in_features, dense.out_features, dense.bias is not None, device="meta")
        self.weight, self.bias = dense.weight, dense.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight + (self.weight.sign() - self.weight).detach(), self.bias)

class SignedLinear(AbstractLinear):
    class Config(Settings):
        pass

    @classmethod
    def of(cls, config, dense):
        return Signed(dense)

EXPORT = SignedLinear
"""


def test_a_kind_of_linear_map_of_one_s_own_is_a_plugin(tmp_path, monkeypatch, lab):
    (tmp_path / "signed.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("stability.registry._plugins", {})
    assert read_spec("sweep", ["plugins=[signed]", "linear=signed", "mechanism=sa"]).linear.name == "signed"
    run = lab.spec(plugins=["signed"], linear="signed", mechanism="sa")
    mapped = build_model(run, 8).blocks[0].ffn.hidden
    assert type(mapped).__name__ == "Signed"
    assert lab.train(run).status()["state"] in ("stable", "plateaued")
