"""Every mechanism under every norm and objective, as it is built for a run, against the dense float64 Hessian of its
loss.

Relative errors of uᵀHu are taken over |u||Hu|, and those of ⟨∇L, u⟩ over |u||∇L|: both sums may nearly cancel, and what
a number that cancels loses then is the arithmetic's, not the method's. A new mechanism is found by its name.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks._examples import drawn, format_of, objectives
from stability.build import build_model, build_objective, build_optimizer
from stability.config.base import validate
from stability.config.run import RunSpec
from stability.curvature import GradientWithGraph, directional, hvp, paper_state, step_direction
from stability.mechanisms._attention import AbstractSoftmaxAttention
from stability.probes.layers.attention import attention_statistics
from stability.registry import Registry
from tests.within import assert_within

from .nets import dense_gradient_and_hessian, flatten, random_direction, row_of_hessian

LOGITS, SCALES = 500.0, (1.0, 4.0)
VOCABULARY, POSITIONS, SEQUENCES = 5, 6, 3
SOURCES = {"images": "images", "sentences": "synthetic_pairs"}


# The mechanisms that stand beside every objective, both norms and both scales of the weights; another adds its own
# operations to the curvature, which do not depend on these, and stands beside one of each direction.
CROSSED = ("sa", "sc")


def combinations():
    """(mechanism, norm, objective), every one that can be built of those in `CROSSED`."""
    for name in Registry("mechanisms").names(cross=False, trainable=True):
        mechanism = Registry("mechanisms").load(name)
        for direction in sorted(mechanism.supported_directions(mechanism.Config())):
            found = list(objectives(direction))
            if name in CROSSED:
                yield from ((name, norm, objective) for objective in found for norm in ("layernorm", "rmsnorm"))
            else:
                yield name, "rmsnorm", found[0]


MODELS = list(combinations())
# Models whose heads have 4 features, not 2. Of 2 features both are near zero at some position under most draws of the
# parameters (retnet, which centres them: nearly equal). There |k|² and the mean of a head's squares are as small as the
# ε of the norms that divide by them (1e-6 and 1e-5), the loss bends over a displacement of √ε, no longer than a step's,
# and float32 keeps too little of what cancels: of retnet with heads of 2, half a rounding of the parameters alone changes
# uᵀHu by 0.8e-5 in float64, and with heads of 4 by 2e-7.
WIDTHS = {"deltanet": 8, "fox": 8, "gated_deltanet": 8, "kda": 8, "retnet": 8, "titans": 8}
# Settings of which the number of parameters, and so the size of the dense Hessian, depends; no operation does.
SMALLER = {"mamba2": {"state": 4}, "sc": {"edge_hidden": 8}}
CASES = [(model, scale) for scale in SCALES for model in MODELS if scale == SCALES[0] or model[0] in CROSSED]


def is_slow(model, scale=SCALES[0]):
    """Whether a case stands in `make slow` alone: larger weights reach no other line of the curvature, and stand beside
    one objective each time; nor do the further objectives of sc under its second norm."""
    name, norm, objective = model
    first = objective in ("mlm", "ar")
    if name not in CROSSED or (first and scale == SCALES[0]):
        return False
    return (name, norm) == ("sc", "rmsnorm") or (scale != SCALES[0] and not (first and norm == "layernorm"))


def marked(model, *scale, often=True):
    """The parameters of a case, with its name and mark. ``often``: outside `make slow`, too."""
    name = "-".join((*model, *(f"weights_times_{each:g}" for each in scale)))
    return pytest.param(model, *scale, id=name, marks=[pytest.mark.slow] * (is_slow(model, *scale) or not often))


every_case = pytest.mark.parametrize(("model", "scale"), [marked(*case) for case in CASES])
# what asks a mechanism for gradients alone, which its own tests do, stands beside those in `CROSSED`
crossed_cases = pytest.mark.parametrize(
    ("model", "scale"), [marked(*case, often=case[0][0] in CROSSED) for case in CASES]
)
both_norms = pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])


@dataclass(frozen=True)
class Oracle:
    """The loss, its parameters and two directions, whose numbers float32 holds exactly; ∇L and H, flat and float64."""

    loss: Callable[..., torch.Tensor]
    params: dict
    directions: dict
    gradient: torch.Tensor
    hessian: torch.Tensor

    def truth(self, name):
        """(slope, its scale, curvature, its scale) along the direction of that name."""
        u = flatten(self.directions[name])
        product = self.hessian @ u
        return (
            float(self.gradient @ u),
            float(u.norm() * self.gradient.norm()),
            float(u @ product),
            float(u.norm() * product.norm()),
        )

    def single(self):
        return {name: param.float() for name, param in self.params.items()}

    def assert_right(self, result, name, rel):
        slope, slope_scale, curvature, curvature_scale = self.truth(name)
        assert result.slope == pytest.approx(slope, abs=rel * slope_scale)
        assert result.curvature == pytest.approx(curvature, abs=rel * curvature_scale)
        if slope < 0 < curvature:  # the quotient's relative error is the sum of its parts'
            room = rel * (slope_scale / -slope + curvature_scale / curvature)
            assert result.alpha_max == pytest.approx(-2 * slope / curvature, rel=room)
        else:
            assert result.alpha_max == (0 if slope >= 0 else float("inf"))


def small(config):
    """Settings of an objective that a dense Hessian can bear: what a time-conditioned model makes of the noise level, a
    few numbers wide."""
    return {name: size for name, size in (("condition_width", 2), ("sinusoids", 4)) if name in config.model_fields}


def spec_of(mechanism, norm, objective):
    size = {"layers": 2, "width": WIDTHS.get(mechanism, 4), "heads": 2, "positions": POSITIONS, "ffn_multiple": 2}
    values = {
        "model": {"name": "oracle", **size},
        "objective": {"name": objective, **small(Registry("objectives").load(objective).Config)},
        "data": {"name": SOURCES.get(Registry("objectives").load(objective).corpus_kind, "stdlib")},
        "schedule": {"name": "constant"},
        "mechanism": {"name": mechanism, **SMALLER.get(mechanism, {})},
        "residual": {"name": "identity"},
        "optimizer": {"name": "adamw"},
        "norm": norm,
    }
    return validate(
        RunSpec,
        values
        | {"steps": 1, "batch": SEQUENCES, "clip_norm": 1.0, "lr_peak": 1e-3, "seed": 0, "data_fingerprint": "none"},
    )


def shaken_model(spec, scale):
    """Every parameter moved off its initial value (gains of one and biases of zero hide terms), matrices times
    ``scale``, rounded to float32.

    Moved by little: a model of width 4 has rows of nearly no variance otherwise, where half a rounding of the
    parameters alone changes uᵀHu by 1e-5.
    """
    model = build_model(spec, format_for(spec)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            moved = param + 0.1 * torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_((moved * (scale if param.ndim > 1 else 1)).float())
    return model


def format_for(spec):
    return format_of(spec.objective.name, VOCABULARY, POSITIONS)


def batch_of(spec, seed):
    objective, generator = build_objective(spec, format_for(spec)), torch.Generator().manual_seed(seed)
    return objective.examples(
        drawn(spec.objective.name, format_for(spec), objective.tokens_needed(POSITIONS), SEQUENCES, generator),
        generator,
    )


def loss_of(model, objective, examples):
    def loss(params):
        total, count = objective.loss(model, examples, params)
        return total / count

    return loss


def optimizer_step(spec, model, losses):
    """AdamW's own u at ``model``, from the state that the gradients of a few batches give (5.2.1) and the last one's
    gradient."""
    model = copy.deepcopy(model)
    params, optimizer = dict(model.named_parameters()), build_optimizer(spec, model)
    gradients = [
        dict(zip(params, torch.autograd.grad(loss(params), list(params.values()), materialize_grads=True), strict=True))
        for loss in losses
    ]
    paper_state(optimizer, gradients, params)
    for name, param in params.items():
        param.grad = gradients[0][name]
    return {name: step.float().double() for name, step in step_direction(optimizer, params, spec.lr_peak).items()}


def oracle_of(spec, model):
    objective = build_objective(spec, format_for(spec))
    losses = [loss_of(model, objective, batch_of(spec, seed)) for seed in range(3)]
    params = {name: param.detach() for name, param in model.named_parameters()}
    directions = {
        "random": {n: u.float().double() for n, u in random_direction(params).items()},
        "adamw": optimizer_step(spec, model, losses),
    }
    return Oracle(losses[0], params, directions, *dense_gradient_and_hessian(losses[0], params))


@cache
def oracle(model, scale):
    spec = spec_of(*model)
    return oracle_of(spec, shaken_model(spec, scale))


@every_case
def test_every_exact_method_equals_the_dense_hessian_to_1e_9(model, scale):
    found = oracle(model, scale)
    for name, direction in found.directions.items():
        for method in ("taylor", "double_backward"):
            result = directional(found.loss, found.params, direction, method)
            assert result.method == method
            found.assert_right(result, name, 1e-9)
    direction = found.directions["adamw"]
    for method in ("auto", "double_backward"):
        held = GradientWithGraph(found.loss, found.params, method=method)
        found.assert_right(held.along(direction), "adamw", 1e-9)
        torch.testing.assert_close(
            flatten(held.gradient()), found.gradient, rtol=0, atol=1e-9 * float(found.gradient.norm())
        )
    product = found.hessian @ flatten(direction)
    torch.testing.assert_close(
        flatten(hvp(found.loss, found.params, direction)), product, rtol=0, atol=1e-9 * float(product.norm())
    )


@every_case
def test_float32_stays_within_1e_5_of_the_float64_truth(model, scale):
    found = oracle(model, scale)
    for name, direction in found.directions.items():
        for method in ("taylor", "double_backward"):
            found.assert_right(directional(found.loss, found.single(), direction, method), name, 1e-5)
        found.assert_right(
            GradientWithGraph(found.loss, found.single(), method="double_backward").along(direction), name, 1e-5
        )


@every_case
def test_the_hessian_is_symmetric_through_every_norm_and_its_gain(model, scale):
    found = oracle(model, scale)
    assert_within(float((found.hessian - found.hessian.T).abs().max()), 1e-12 * float(found.hessian.abs().max()))


@crossed_cases
def test_finite_differences_error_bar_covers_the_truth_in_both_precisions(model, scale):
    found = oracle(model, scale)
    for name, direction in found.directions.items():
        _, _, truth, curvature_scale = found.truth(name)
        for params in (found.params, found.single()):
            result = directional(found.loss, params, direction, "finite_difference")
            assert result.method == "finite_difference"
            assert_within(abs(result.curvature - truth), result.error_bar)
            assert result.error_bar < 0.2 * curvature_scale  # a bar that covers everything says nothing


@both_norms
def test_the_dense_hessian_is_what_one_row_after_another_gives(norm):
    """Reverse over reverse, batched by vmap or not, with a norm's gain (and LayerNorm's bias) among what is
    differentiated."""
    found = oracle(("sa", norm, "mlm"), 1.0)
    start = 0
    for name, param in found.params.items():
        if name in (
            "blocks.0.mixer_norm.weight",
            "blocks.0.mixer_norm.bias",
            "final_norm.weight",
            "blocks.1.mixer.qkv.weight",
        ):
            row = row_of_hessian(found.loss, found.params, start)
            torch.testing.assert_close(found.hessian[start], row, rtol=0, atol=1e-12 * float(row.norm()))
            assert float(row.norm()) > 0
        start += param.numel()


def sharpened(model, loss):
    """Scale the query and key weights of one layer after another until its largest logit is ``LOGITS``; the logits that
    were measured."""
    params = dict(model.named_parameters())
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        for name in attention_statistics(model, lambda: loss(params)):
            found = attention_statistics(model, lambda: loss(params))[name].logit_max
            projection = model.get_submodule(name).qkv
            rows = slice(0, 2 * projection.in_features)
            for param in (projection.weight, projection.bias):
                param[rows] = (param[rows] * (LOGITS / found) ** 0.5).float()
        return [statistics.logit_max for statistics in attention_statistics(model, lambda: loss(params)).values()]


@cache
def takes_a_softmax(mechanism):
    """Whether some layer of a model with that mechanism takes a softmax of attention logits."""
    spec = spec_of(*next(model for model in MODELS if model[0] == mechanism))
    return any(isinstance(layer, AbstractSoftmaxAttention) for layer in build_model(spec, format_for(spec)).modules())


def attention_models():
    """Those of ``MODELS`` in which some layer takes a softmax of attention logits."""
    return [model for model in MODELS if takes_a_softmax(model[0])]


@pytest.mark.parametrize("model", [marked(model) for model in attention_models()])
def test_exact_methods_in_float32_stay_within_1e_2_at_attention_logits_near_500(model):
    """Where the paper's raw ε = 1e-4 is off by ten times as much at least. ‖u‖ = 1,000, as AdamW's is in a model of
    real size."""
    spec = spec_of(*model)
    objective, net = build_objective(spec, format_for(spec)), shaken_model(spec, 1.0)
    logits = sharpened(net, loss_of(net, objective, batch_of(spec, 0)))
    assert all(0.9 * LOGITS < largest < 1.1 * LOGITS for largest in logits)
    found = oracle_of(spec, net)
    for name, direction in found.directions.items():
        stretch = 1000 / float(flatten(direction).norm())
        long, truth = {key: stretch * step for key, step in direction.items()}, stretch**2 * found.truth(name)[2]
        off = {
            method: abs(directional(found.loss, found.single(), long, method).curvature - truth)
            for method in ("taylor", "double_backward", "parity")
        }
        exact = max(off["taylor"], off["double_backward"])
        assert_within(exact, 1e-2 * abs(truth))
        assert 10 * exact < off["parity"]
