"""Runge-Kutta connections: against a tableau worked through in plain floats, their order against closed forms, and what
several evaluations of a branch mean for cost, dropout, losses, weights and probes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stability.build import build_model, build_objective, build_optimizer, shapes
from stability.config.parts import validate_settings
from stability.config.training import WeightsSpec
from stability.curvature import directional
from stability.curvature.taylor import missing_rule
from stability.mechanisms import AbstractMechanism, WithLoss
from stability.mechanisms.sa import SoftmaxAttention
from stability.models.block import Block
from stability.models.passes import computing_in, dropping
from stability.probes.layers.attention import attention_statistics
from stability.probes.layers.measuring import layer_inputs
from stability.probes.layers.observing import list_observable
from stability.probes.layers.training_free import record_passes
from stability.registry import Registry
from stability.residuals import build
from stability.training.weights import Weights
from sweeps.costs import _count_mixing
from tests.conftest import Lab

SCHEMES = ("euler", "rk2", "rk4", "gated")
EVALUATIONS = {"euler": 1, "rk2": 2, "rk4": 4, "gated": 2}
WIDTH = 3


def ode(scheme: str, **settings: Any) -> Any:
    return build("ode", width=WIDTH, scheme=scheme, **settings).double()


def shaken(connection: Any) -> Any:
    with torch.no_grad():
        for number, parameter in enumerate(connection.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return connection


# --- the schemes ------------------------------------------------------------------------------------------------------

# of each stage, by how much of the earlier stages its argument is off x, then the weights of all (Butcher's tableaus)
TABLEAUS = {
    "euler": ([[]], [1]),
    "rk2": ([[], [1]], [1 / 2, 1 / 2]),
    "rk4": ([[], [1 / 2], [0, 1 / 2], [0, 0, 1]], [1 / 6, 1 / 3, 1 / 3, 1 / 6]),
}


def stepped(x: list[float], scheme: str, h: float, parameters: list[list[float]]) -> list[float]:
    """One step along the field of `curled`; ``parameters``: of the gate, W (2D) and b (1)."""
    offsets, weights = TABLEAUS["rk2" if scheme == "gated" else scheme]
    stages: list[list[float]] = []
    for row in offsets:
        at = [x[d] + h * sum(a * stage[d] for a, stage in zip(row, stages, strict=True)) for d in range(WIDTH)]
        stages.append([math.sin(at[d]) * at[(d + 1) % WIDTH] for d in range(WIDTH)])
    if scheme == "gated":
        (w, (b,)) = parameters
        gate = 1 / (1 + math.exp(-sum(u * v for u, v in zip(w, stages[0] + stages[1], strict=True)) - b))
        weights = [gate, 1 - gate]
    return [x[d] + h * sum(b * stage[d] for b, stage in zip(weights, stages, strict=True)) for d in range(WIDTH)]


def curled(u_BND: Tensor) -> Tensor:
    return u_BND.sin() * u_BND.roll(-1, -1)


@pytest.mark.parametrize(("step", "steps"), [(1.0, 1), (0.7, 1), (0.4, 3)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_connection_is_the_tableau_worked_through(scheme, step, steps):
    connection = shaken(ode(scheme, step=step, steps=steps))
    x_BND = torch.randn(2, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = connection(x_BND, curled)
    parameters = [parameter.flatten().tolist() for parameter in connection.parameters()]
    assert len(parameters) == (2 if scheme == "gated" else 0)
    for x, y in zip(x_BND.flatten(0, 1).tolist(), found.flatten(0, 1), strict=True):
        for _ in range(steps):
            x = stepped(x, scheme, step, parameters)
        torch.testing.assert_close(y, torch.tensor(x, dtype=torch.float64), rtol=1e-13, atol=1e-14)


def errors(connections: list[Any], branch: Any, x_BND: Tensor, exact_BND: Tensor) -> list[float]:
    return [float((each(x_BND, branch) - exact_BND).norm()) for each in connections]


@pytest.mark.parametrize(("scheme", "expected"), [("euler", 2), ("rk2", 4), ("gated", 4), ("rk4", 16)])
def test_the_error_falls_by_the_schemes_order_on_a_linear_field_and_on_logistic_growth(scheme, expected):
    """Against exp(tA)x and the logistic function at t = 1; a linear field does not tell where stages lie. The gate
    begins as rk2."""
    generator = torch.Generator().manual_seed(1)
    a_DD = torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator)
    x_BND = torch.rand(1, 5, WIDTH, dtype=torch.float64, generator=generator)
    connections = [ode(scheme, step=1 / steps, steps=steps) for steps in (32, 64, 128)]
    linear = errors(connections, lambda u_BND: u_BND @ a_DD.T, x_BND, x_BND @ torch.matrix_exp(a_DD).T)
    grown_BND = 1 / (1 + (1 / x_BND - 1) * math.exp(-1))
    logistic = errors(connections, lambda u_BND: u_BND * (1 - u_BND), x_BND, grown_BND)
    for coarse, middle, fine in (linear, logistic):
        assert coarse / middle == pytest.approx(expected, rel=0.08)
        assert middle / fine == pytest.approx(expected, rel=0.04)


def test_a_gate_that_has_left_the_half_is_of_first_order():
    x_BND = torch.rand(1, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    connections = [shaken(ode("gated", step=1 / steps, steps=steps)) for steps in (32, 64, 128)]
    coarse, middle, fine = errors(connections, lambda u_BND: -u_BND, x_BND, x_BND * math.exp(-1))
    assert coarse / middle == pytest.approx(2, rel=0.08) and middle / fine == pytest.approx(2, rel=0.04)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheme": "rk3"}, "residual.ode.scheme='rk3': "),
        ({"step": 0}, "residual.ode.step=0: "),
        ({"step": float("inf")}, "residual.ode.step=inf: "),
        ({"steps": 0}, "residual.ode.steps=0: "),
        ({"order": 2}, "residual.ode.order"),
    ],
)
def test_what_is_no_scheme_is_refused_in_a_line(settings, message):
    with pytest.raises(ValueError) as caught:
        validate_settings("residuals", "ode", settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)


# --- whole models -----------------------------------------------------------------------------------------------------


def spec_of(lab, scheme: str, steps: int = 1, **changes: Any) -> Any:
    return lab.spec(residual={"name": "ode", "scheme": scheme, "steps": steps}, **changes)


def test_a_run_with_euler_is_the_plain_one_bit_for_bit(lab):
    plain, euler = lab.train(lab.spec(precision="bf16")), lab.train(spec_of(lab, "euler", precision="bf16"))
    assert plain.run_id != euler.run_id
    assert plain.metrics_file.read_bytes() == euler.metrics_file.read_bytes()


CONTEXT = {"objective": {"name": "mlm", "context": 6}, "cross": {"name": "ca"}}


@pytest.mark.parametrize("changes", [{}, CONTEXT], ids=["alone", "cross"])
@pytest.mark.parametrize(("scheme", "steps"), [*((scheme, 1) for scheme in SCHEMES), ("rk4", 2)])
def test_the_plans_mixing_counts_how_often_each_mixer_is_called(lab, scheme, steps, changes):
    spec, plain = spec_of(lab, scheme, steps, **changes), lab.spec(**changes)
    model: Any = build_model(spec, 40)
    objective, calls = build_objective(spec, 40), []
    for block in model.blocks:
        for module in (block.mixer, block.ffn, *([block.cross.mechanism] if block.cross else [])):
            module.register_forward_hook(lambda module, *_: calls.append(module))
    tokens = torch.randint(40, (2, objective.tokens_needed(16)), generator=torch.Generator().manual_seed(2))
    objective.examples(tokens, torch.Generator().manual_seed(3)).logits(model)
    often = EVALUATIONS[scheme] * steps
    assert {calls.count(module) for module in calls} == {often}
    assert len(calls) == often * 2 * (3 if changes else 2)
    assert _count_mixing(spec, "bidirectional") == often * _count_mixing(plain, "bidirectional") > 0


def test_an_untrained_gate_is_rk2_its_weights_get_a_gradient_and_decay_leaves_its_bias_alone(lab):
    gated, heun = spec_of(lab, "gated", optimizer={"name": "adamw", "weight_decay": 0.5}), spec_of(lab, "rk2")
    model: Any = build_model(gated, 40)
    other = build_model(heun, 40)
    tokens = torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(tokens), other(tokens), rtol=1e-5, atol=1e-5)
    model(tokens).square().mean().backward()
    gates = {name: parameter for name, parameter in model.named_parameters() if "residual" in name}
    assert {name.rpartition(".")[2]: parameter.numel() for name, parameter in gates.items()} == {
        "weight": 32,
        "bias": 1,
    }
    assert len(gates) == 8 and all(parameter.grad.abs().max() > 0 for parameter in gates.values())
    undecayed = [group for group in build_optimizer(gated, model).param_groups if group["weight_decay"] == 0]
    assert {id(parameter) for group in undecayed for parameter in group["params"]} == {
        id(parameter) for name, parameter in gates.items() if name.endswith("bias")
    }


def test_each_evaluation_drops_by_a_mask_of_its_own_that_step_and_row_decide(lab):
    spec = spec_of(
        lab, "rk4", model={"name": "x", "layers": 1, "width": 16, "heads": 2, "positions": 16, "dropout": 0.3}
    )
    model: Any = build_model(spec, 40)
    masks: list[Tensor] = []
    model.blocks[0].dropout.register_forward_hook(lambda _, args, output: masks.append(output == 0))
    tokens = torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(0))
    outputs = []
    for row in (0, 0, 4):
        with dropping(model, torch.device("cpu"), 0, "train", 1, row):
            outputs.append(model(tokens))
    first, again, other = masks[:8], masks[8:16], masks[16:]
    assert len(other) == 8
    assert not any(torch.equal(one, two) for index, one in enumerate(first) for two in first[:index])
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


def test_an_interrupted_run_with_dropout_goes_on_to_the_same_bits(lab, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    size = {"name": "tiny", "layers": 2, "width": 16, "heads": 2, "positions": 16, "dropout": 0.2}
    changes = {"model": size, "steps": 4, "checkpoint": {"every_steps": 2}}
    whole, other = lab.train(spec_of(lab, "gated", **changes)), Lab(folder)
    spec = spec_of(other, "gated", **changes)
    assert not other.train(spec, steps=3).finished
    assert other.train(spec).metrics_file.read_bytes() == whole.metrics_file.read_bytes()


class Charged(AbstractMechanism):
    """A mixer that returns the sine of its input, and for each sequence the mean of its squares."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Any:
        return WithLoss(x_BND.sin(), x_BND.square().mean((1, 2)))


def test_a_loss_of_a_branchs_own_is_the_mean_over_its_evaluations():
    x_BND = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    block = Block(Charged(), nn.Tanh(), (nn.Identity(), nn.Identity()), (ode("rk2", step=0.5), ode("rk4")))
    found = block(x_BND, None)
    at = (x_BND, x_BND + 0.5 * x_BND.sin())
    torch.testing.assert_close(found.loss_B, sum(each.square().mean((1, 2)) for each in at) / 2, rtol=1e-14, atol=0)
    both = Block(Charged(), Charged(), (nn.Identity(), nn.Identity()), (ode("rk2", step=0.5), ode("euler")))(
        x_BND, None
    )
    after_BND = x_BND + 0.25 * (at[0].sin() + at[1].sin())
    torch.testing.assert_close(both.loss_B, found.loss_B + after_BND.square().mean((1, 2)), rtol=1e-13, atol=0)


@pytest.mark.parametrize("scheme", ["rk4", "gated"])
def test_slope_and_curvature_of_a_model_are_exact_by_taylors_rules(lab, scheme):
    """Against central differences of the loss in float64, without double backward for lack of a rule."""
    spec = spec_of(lab, scheme, objective={"name": "ar"})
    model, objective = build_model(spec, 40).double(), build_objective(spec, 40)
    tokens = torch.randint(40, (3, objective.tokens_needed(16)), generator=torch.Generator().manual_seed(2))
    examples = objective.examples(tokens, torch.Generator().manual_seed(3))
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(4)
    direction = {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / 30
        for name, tensor in params.items()
    }

    def loss(at: Any, part: Any = examples) -> Any:
        return objective.loss(model, part, at)

    def value(t: float) -> float:
        total, count = loss({name: tensor + t * direction[name] for name, tensor in params.items()})
        return float(total.detach() / count)

    h = 1e-3
    assert missing_rule(loss, params, batches=[examples]) is None
    found = directional(loss, params, direction, "taylor", batches=[examples])
    assert found.slope == pytest.approx((value(h) - value(-h)) / (2 * h), rel=1e-4)
    assert found.curvature == pytest.approx((value(h) - 2 * value(0.0) + value(-h)) / h**2, rel=1e-4)


def test_in_bfloat16_the_state_and_the_gate_stay_in_float32():
    generator = torch.Generator().manual_seed(0)
    x_BND = torch.randn(2, 5, WIDTH, generator=generator)
    linear = nn.Linear(WIDTH, WIDTH)
    for scheme in SCHEMES:
        connection, seen = shaken(ode(scheme, step=0.3)).float(), []

        def branch(u_BND: Tensor, seen: list[Any] = seen) -> Tensor:
            y_BND = linear(u_BND)
            seen.append((u_BND.dtype, y_BND))
            return y_BND

        with torch.no_grad(), computing_in("bf16", "cpu"):
            found = connection(x_BND, branch)
        assert found.dtype == torch.float32
        assert {dtype for dtype, _ in seen} == {torch.float32} and seen[0][1].dtype == torch.bfloat16
        outputs = iter([y_BND.double() for _, y_BND in seen])
        expected = connection.double()(x_BND.double(), lambda _, outputs=outputs: next(outputs))
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


# --- weights and probes -----------------------------------------------------------------------------------------------


def test_a_plain_models_weights_go_on_as_runge_kuttas_and_as_gated_ones_with_new_gates(lab):
    source = lab.train(lab.spec())
    weights = Weights.find(WeightsSpec(source=f"ckpt:{source.path}"), {}, lab.cache)
    weights.fit(shapes(spec_of(lab, "rk4", steps=3), 256)).require(weights.spec, "ode")
    with pytest.raises(ValueError, match="missing: blocks.0.mixer_residual.weight, blocks.0.mixer_residual.bias, "):
        weights.fit(shapes(spec_of(lab, "gated"), 256)).require(weights.spec, "ode")
    kept = Weights.find(WeightsSpec(source=f"ckpt:{source.path}", partial=True), {}, lab.cache).keep(lab.cache)
    run = lab.train(spec_of(lab, "gated", weights=kept.spec.model_dump(mode="json")))
    heun = lab.train(spec_of(lab, "rk2", weights=kept.spec.model_dump(mode="json")))
    start = [each.status()["result"]["init_nll"] for each in (run, heun, source)]
    assert start[0] == pytest.approx(start[1], rel=1e-5) and start[0] != pytest.approx(start[2], rel=1e-3)


@pytest.mark.parametrize("loops", [1, 2])
def test_probes_of_layers_read_the_first_evaluation_of_each(lab, loops):
    """By hand: what leaves a block enters the next; a norm before the mixer."""
    size = {"name": "tiny", "layers": 2, "width": 16, "heads": 2, "positions": 16, "loops": loops}
    spec = spec_of(lab, "rk4", steps=2, model=size)
    model: Any = build_model(spec, 40)
    objective = build_objective(spec, 40)
    tokens = torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(2))
    examples = objective.examples(tokens, torch.Generator().manual_seed(3))
    inputs, both = layer_inputs(model, examples), record_passes(model, examples)
    assert len(inputs) == len(both) == 2 * loops
    state = model.embedding(examples.inputs_BN)
    for block, given_BND, (x_BND, _, y_BND) in zip(model.list_passes(), inputs, both, strict=True):
        torch.testing.assert_close(given_BND, block.mixer_norm(state).detach(), rtol=1e-5, atol=1e-5)
        assert torch.equal(x_BND, given_BND)
        torch.testing.assert_close(y_BND, block.mixer(given_BND).detach(), rtol=1e-4, atol=1e-5)
        state = block(state, None)
    last: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, SoftmaxAttention):

            def keep(_: nn.Module, args: tuple[Tensor, ...], key: str = name) -> None:
                last[key] = args[0].detach()

            module.register_forward_pre_hook(keep)
    found = attention_statistics(model, lambda: examples.logits(model))
    assert list(found) == list(last)
    alone = {
        name: attention_statistics(module, lambda module=module, x=last[name]: module(x))[""]
        for name, module in model.named_modules()
        if isinstance(module, SoftmaxAttention)
    }
    assert {name: each.logit_max for name, each in found.items()} == {
        name: pytest.approx(each.logit_max) for name, each in alone.items()
    }


def test_it_has_a_single_stream_to_the_probe_of_streams(lab):
    observable = list_observable(spec_of(lab, "rk2"), "streams")
    assert (observable.part, observable.is_there, observable.not_observed) == ("ode", False, ())


def test_schemes_that_say_nothing_evaluate_a_branch_once():
    for name in Registry("residuals").names():
        scheme = Registry("residuals").load(name)
        assert scheme.evaluations(scheme.Config()) == (2 if name == "ode" else 1)
