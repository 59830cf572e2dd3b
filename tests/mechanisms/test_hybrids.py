"""Hybrids: one layer of softmax attention in four, the others of each mechanism that is causal by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stability.build import build_model, build_objective
from stability.curvature import directional
from stability.probes.layers.observing import mixers, stem
from tests.mechanisms.names import CAUSAL_ONLY
from tests.mechanisms.small import SMALL
from tests.reading import read_spec

SIZE = {"name": "tiny", "layers": 4, "width": 16, "heads": 2, "positions": 16}


def hybrid(lab, name: str, layers: int = 4) -> Any:
    mechanism = {"name": "mix", "order": "cycled", "pattern": [name] * 3 + ["sa"], name: SMALL.get(name, {})}
    return lab.spec(mechanism=mechanism, objective={"name": "ar"}, model=SIZE | {"layers": layers})


def built(spec: Any) -> Any:
    """The model in float64 with every parameter moved, so that no gate or map is at a value at which it does nothing."""
    model = build_model(spec, 40).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


@pytest.mark.parametrize("name", CAUSAL_ONLY)
def test_a_hybrid_has_softmax_attention_in_every_fourth_layer_and_reads_no_later_token(lab, name):
    model = built(hybrid(lab, name, layers=5))
    assert [stem(mixer) for mixer in mixers(model)] == [name, name, name, "sa", name]
    embedded_BND = model.embedding(torch.arange(16)[None]).detach().requires_grad_()
    model.embedding.forward = lambda tokens_BN: embedded_BND
    logits_BNV = model(torch.arange(16)[None])
    for position in (0, 7, 14):
        (gradient_BND,) = torch.autograd.grad(logits_BNV[:, position].square().sum(), embedded_BND, retain_graph=True)
        assert gradient_BND[:, : position + 1].abs().sum(-1).min() > 0
        assert not gradient_BND[:, position + 1 :].count_nonzero()


@pytest.mark.parametrize("name", CAUSAL_ONLY)
def test_curvature_of_a_hybrid_is_that_of_double_backward(lab, name):
    spec = hybrid(lab, name)
    model, objective = built(spec), build_objective(spec, 40)
    tokens = torch.randint(40, (2, objective.tokens_needed(16)), generator=torch.Generator().manual_seed(2))
    examples = objective.examples(tokens, torch.Generator().manual_seed(3))
    params = {key: parameter.detach() for key, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(4)
    direction = {
        key: torch.randn(value.shape, generator=generator, dtype=torch.float64) / 30 for key, value in params.items()
    }

    def loss(at: Any) -> Any:
        total, count = objective.loss(model, examples, at)
        return total / count

    taylor, exact = (directional(loss, params, direction, method) for method in ("taylor", "double_backward"))
    assert taylor.curvature == pytest.approx(exact.curvature, rel=1e-7, abs=1e-7)
    assert taylor.slope == pytest.approx(exact.slope, rel=1e-8)


@pytest.mark.parametrize("name", CAUSAL_ONLY)
def test_a_model_shallower_than_the_pattern_is_refused_in_a_line(lab, name):
    with pytest.raises(ValueError) as caught:
        hybrid(lab, name, layers=2)
    assert str(caught.value) == (
        "mechanism.mix.pattern has 4 entries for 2 layers; give model.layers=4 or more, a pattern of at most 2, or "
        "mechanisms without one, e.g. mechanism=[sa,sc]"
    )


def test_settings_of_a_hybrids_parts_are_given_on_the_command_line_and_its_run_learns(lab):
    words = ["mechanism=mix", "mechanism.mix.order=cycled", "mechanism.mix.pattern=[fox,fox,nsa,sa]"]
    words += [f"mechanism.mix.nsa.{key}={value}" for key, value in SMALL["nsa"].items()]
    words += ["objective=ar", "lr=[1e-2]", "model=nano", "model.width=16", "model.heads=2", "model.positions=16"]
    asked = read_spec("sweep", [*words, "data=text", f"data.path={lab.text}"])
    (mechanism,) = asked.mechanism
    fox, nsa, sa = mechanism.settings.parts
    assert [part.name for part in (fox, nsa, sa)] == ["fox", "nsa", "sa"]
    assert {key: getattr(nsa.settings, key) for key in SMALL["nsa"]} == SMALL["nsa"]
    directory = lab.train(lab.spec(mechanism=mechanism, objective=asked.objective, model=asked.model, lr_peak=1e-2))
    result = directory.status()["result"]
    assert result["val_nll"] < result["init_nll"] - 0.05
