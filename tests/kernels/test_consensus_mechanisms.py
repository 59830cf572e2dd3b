"""sc and cc with ``impl=triton`` are what they are with ``impl=reference``: alone, in a model, along a line, in
training."""

from __future__ import annotations

import json

import pytest
import torch

from kernels.consensus import LARGEST as SIZES
from stability.config.parts import kernels_of
from stability.config.rules.kernels import require_second_derivatives
from stability.curvature import directional, hvp
from stability.mechanisms import build
from stability.mechanisms._edge_weights import LARGEST
from tests.curvature import test_dense_oracle as oracle
from tests.kernels.interpreted import interpreter_is_prepared_once
from tests.within import assert_within

__all__ = ["interpreter_is_prepared_once"]

FORMS = {
    "sc": ("sc", {"window": 2, "rank": 2}, None),
    "sc, learned steps, nothing turned": ("sc", {"rope": "none", "iterations": 2, "step": "learned", "rank": 1}, None),
    "sc, scalar weights": ("sc", {"rank": 0}, None),
    "sc, absolute": ("sc", {"rope": "absolute", "iterations": 2, "rank": 1}, None),
    "sc, relative": ("sc", {"rope": "relative", "iterations": 2, "rank": 2}, None),
    "sc, gradient": ("sc", {"rope": "gradient", "iterations": 2, "rank": 1}, None),
    "cc, relative, in a window": ("cc", {"rope": "relative", "window": 1, "rank": 1}, 6),
    "cc, relative, with all of a context": ("cc", {"rope": "relative", "rank": 1}, 2),
    "cc, absolute, in a window": ("cc", {"rope": "absolute", "window": 1, "rank": 1}, 6),
    "cc, nothing turned": ("cc", {"rope": "none", "window": 1, "rank": 1}, 6),
    "cc in a window": ("cc", {"window": 1, "rank": 1}, 6),
    "cc with all of a context": ("cc", {"rank": 1, "iterations": 2, "step": "learned"}, 2),
}


def pair(name, settings):
    """The mechanism by kernels and by torch, with the same parameters."""
    fused, plain = (
        build(name, width=8, heads=2, edge_hidden=5, impl=impl, **settings) for impl in ("triton", "reference")
    )
    fused.load_state_dict(plain.state_dict())
    return fused, plain


@pytest.mark.parametrize(("name", "settings", "context"), FORMS.values(), ids=FORMS)
def test_output_and_gradients_equal_the_reference_under_padding(name, settings, context):
    generator = torch.Generator().manual_seed(0)
    x_BND, mask_BN = torch.randn(2, 6, 8, generator=generator), torch.rand(2, 6, generator=generator) > 0.2
    given, masks = [x_BND], {"mask_BN": mask_BN}
    if context is not None:
        given.append(torch.randn(2, context, 8, generator=generator))
        masks["context_mask_BJ"] = torch.rand(2, context, generator=generator) > 0.2
    found = []
    for module in pair(name, settings):
        inputs = [each.clone().requires_grad_() for each in given]
        y_BND = module(*inputs, **masks)
        found.append((y_BND, *torch.autograd.grad(y_BND.square().sum(), [*inputs, *module.parameters()])))
    largest = max(float(each.norm()) for each in found[1][1:])
    for of_kernels, of_torch in zip(*found, strict=True):
        assert_within(float((of_kernels - of_torch).norm()), 1e-5 * max(float(of_torch.norm()), 1e-2 * largest))


def test_the_sizes_that_the_setting_allows_are_those_of_the_kernels():
    assert list(LARGEST.values()) == [SIZES[name] for name in ("window", "rank", "hidden", "head width")]


@pytest.mark.parametrize(
    ("name", "settings", "what"),
    [
        ("sc", {"graph": "cycle"}, "graph=cycle"),
        ("sc", {"edge_mlp": "separate"}, "edge_mlp=separate"),
        ("cc", {"edge_mlp": "separate"}, "edge_mlp=separate"),
        ("sc", {"step": "bounded"}, "step=bounded"),
        ("cc", {"step": "bounded"}, "step=bounded"),
        ("sc", {"rank": 17}, "rank=17 > 16"),
        ("cc", {"window": 17}, "window=17 > 16"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused_by_name(name, settings, what):
    with pytest.raises(ValueError, match=rf"{name}.impl=triton has no kernel for {what}; impl=reference computes it"):
        build(name, width=8, heads=2, impl="triton", **settings)


@pytest.mark.parametrize("rope", ["absolute", "relative", "gradient", "none"])
def test_alpha_max_of_a_model_is_measured_through_the_kernels(rope):
    """Against double backward in float64 through torch's own operations, which `oracle` holds to a dense Hessian, along
    AdamW's step."""
    spec = oracle.spec_of("sc", "layernorm", "mlm")
    by_impl = {}
    for impl in ("triton", "reference"):
        changes = {"window": 1, "rank": 1, "edge_hidden": 3, "impl": impl, "rope": rope}
        settings = spec.mechanism.settings.model_copy(update=changes)
        by_impl[impl] = spec.model_copy(update={"mechanism": spec.mechanism.model_copy(update={"settings": settings})})
    plain = oracle.shaken_model(by_impl["reference"], 1.0)
    fused = oracle.build_model(by_impl["triton"], oracle.format_for(spec))
    fused.load_state_dict(plain.state_dict())
    assert fused.blocks[0].mixer.config.impl == "triton" and plain.blocks[0].mixer.config.impl == "reference"
    objective, examples = oracle.build_objective(spec, oracle.format_for(spec)), oracle.batch_of(spec, 0)
    exact = oracle.loss_of(plain, objective, examples)
    direction = oracle.optimizer_step(by_impl["reference"], plain, [exact])
    params = {name: param.detach() for name, param in plain.named_parameters()}
    truth = directional(exact, params, direction, "double_backward")
    found = directional(
        oracle.loss_of(fused, objective, examples),
        {name: param.float() for name, param in params.items()},
        {name: step.float() for name, step in direction.items()},
        "auto",
    )
    product = oracle.flatten(hvp(exact, params, direction))
    scale = float(oracle.flatten(direction).norm() * product.norm())
    assert found.method == "taylor"
    assert found.curvature == pytest.approx(truth.curvature, abs=1e-5 * scale)
    assert found.alpha_max == pytest.approx(truth.alpha_max, rel=1e-5 * (1 + scale / abs(truth.curvature)))


def test_a_run_may_ask_for_alpha_max_along_a_line(lab):
    spec = lab.spec(mechanism={"name": "sc", "impl": "triton"})
    kernels = kernels_of({"mechanism": spec.mechanism})
    assert [each.setting for each in kernels] == ["mechanism.sc.impl=triton"]
    require_second_derivatives(kernels, "this", "", along_a_line=True)
    with pytest.raises(ValueError, match="this takes second derivatives by autograd, and mechanism.sc.impl=triton has"):
        require_second_derivatives(kernels, "this", "")


@pytest.mark.slow
def test_three_steps_of_training_equal_those_of_the_reference(lab):
    changes = {
        "model": {"name": "tiny", "layers": 1, "width": 8, "heads": 2, "positions": 8},
        "evaluation": {"every_steps": 3, "sequences": 2},
        "steps": 3,
        "batch": 2,
    }
    losses = []
    for impl in ("triton", "reference"):
        spec = lab.spec(mechanism={"name": "sc", "impl": impl, "rank": 2, "edge_hidden": 8}, **changes)
        lines = (lab.train(spec).path / "metrics.jsonl").read_text().splitlines()
        numbers = [value for line in lines for _, value in sorted(json.loads(line).items())]
        losses.append([value for value in numbers if isinstance(value, float)])
    assert len(losses[0]) >= 3 and losses[0] == pytest.approx(losses[1], rel=1e-5)
