"""Each feed-forward network against its formula in slow loops over plain Python floats."""

from __future__ import annotations

import json
import math

import pytest
import torch

from stability.config.identity import essence
from stability.config.parse import parse_run
from stability.ffns import build
from tests.identity.golden_ids import BASE
from tests.reading import read_spec

ACTIVATIONS = {
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
}


def linear(x, parameters, name):
    weight, bias = parameters[f"{name}.weight"], parameters.get(f"{name}.bias")
    rows = [math.fsum(w * value for w, value in zip(row, x, strict=True)) for row in weight]
    return rows if bias is None else [row + b for row, b in zip(rows, bias, strict=True)]


def mlp(x, parameters, activation):
    return linear([activation(value) for value in linear(x, parameters, "hidden")], parameters, "out")


def glu(x, parameters, activation):
    gate, hidden = linear(x, parameters, "gate"), linear(x, parameters, "hidden")
    return linear([activation(g) * h for g, h in zip(gate, hidden, strict=True)], parameters, "out")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("name", "formula", "activation"),
    [("mlp", mlp, each) for each in ACTIVATIONS] + [("glu", glu, each) for each in ("silu", "gelu", "relu")],
)
def test_a_network_is_its_formula(name, formula, activation, bias):
    torch.manual_seed(0)
    module = build(name, width=6, activation=activation, bias=bias).double()
    parameters = {key: parameter.tolist() for key, parameter in module.named_parameters()}
    assert any(key.endswith("bias") for key in parameters) is bias
    x_ND = 2 * torch.randn(4, 6, dtype=torch.float64)
    expected = torch.tensor(
        [formula(row, parameters, ACTIVATIONS[activation]) for row in x_ND.tolist()], dtype=torch.float64
    )
    torch.testing.assert_close(module(x_ND), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "settings", "hidden"),
    [
        ("mlp", {}, 48),
        ("mlp", {"multiple": 1.5}, 18),
        ("glu", {}, 32),
        ("glu", {"multiple": 1.5}, 18),
        ("glu", {"multiple": 0.01}, 1),
    ],
)
def test_the_hidden_width_is_the_part_s_own_multiple_or_made_from_the_model_s(name, settings, hidden):
    assert build(name, width=12, ffn_multiple=4.0, **settings).hidden.out_features == hidden


def test_a_glu_has_as_many_weights_as_an_mlp():
    one, two = (build(name, width=12, bias=False) for name in ("mlp", "glu"))
    assert len({sum(parameter.numel() for parameter in each.parameters()) for each in (one, two)}) == 1


def test_it_is_chosen_and_set_on_the_command_line():
    spec = read_spec("sweep", ["ffn=glu", "ffn.activation=gelu", "ffn.multiple=3"])
    assert (spec.ffn.name, spec.ffn.settings.model_dump()) == (
        "glu",
        {"activation": "gelu", "multiple": 3.0, "bias": False},
    )
    usual = read_spec("sweep", [])
    assert (usual.ffn.name, usual.ffn.settings.activation) == ("mlp", "gelu")
    assert read_spec("train_tokenizer", ["ffn=glu"]).run("data").ffn.name == "glu"
    with pytest.raises(ValueError, match=r"ffn.activation='tanh': input should be 'silu', 'gelu' or 'relu'"):
        read_spec("sweep", ["ffn=glu", "ffn.activation=tanh"])


def test_the_network_of_old_is_not_in_an_id_and_another_is():
    def written(**changes):
        return json.loads(essence(parse_run(BASE | changes)))

    assert "ffn" not in written() and "ffn" not in written(ffn={"name": "mlp", "bias": True, "multiple": None})
    assert written(ffn={"name": "mlp", "activation": "silu"})["ffn"] == {"name": "mlp", "activation": "silu"}
    assert written(ffn="glu")["ffn"] == {"name": "glu", "activation": "silu", "multiple": None, "bias": False}
