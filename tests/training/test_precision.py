"""A run in bfloat16 computes its products in it and nothing else: state, norms, coefficients, losses and gradients stay
in float32."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from stability.build import build_model, build_objective
from stability.config.curvature import CurvatureSpec
from stability.config.identity import run_id
from stability.corpora.cache import load
from stability.curvature import directional
from stability.models.passes import computing_in
from stability.objectives import training_examples
from stability.probes.checkpoints import Loaded
from stability.probes.curvature.checkpoint_descent import Probe
from stability.registry import Registry
from stability.residuals import build
from stability.runs.directory import read_jsonl
from tests.reading import read_spec
from tests.residuals.test_contract import shake
from tests.training.test_loop import final_weights, same
from tests.within import assert_within

CPU = torch.device("cpu")
MECHANISMS = Registry("mechanisms").names(cross=False, trainable=True)
OTHERS = [
    (family, key, name)
    for family, key in (("residuals", "residual"), ("norms", "norm"), ("ffns", "ffn"), ("linears", "linear"))
    for name in Registry(family).names()
]
# sc takes the weights of its maps itself, and its Laplacian is quadratic in them: what bfloat16 rounds counts twice
NEAR = 0.05


def made(lab, **changes):
    """Return a tiny model, its objective and a batch."""
    spec = lab.spec(**changes)
    corpus = load(lab.cache, spec.data_fingerprint)
    objective = build_objective(spec, corpus.format)
    examples = training_examples(spec, corpus, objective, "train", 1, seed=0, batch=4)
    return build_model(spec, corpus.format), objective, examples


def loss_and_gradient(model, objective, examples, precision):
    model.zero_grad()
    with computing_in(precision, CPU):
        total, count = objective.loss(model, examples)
    (total / count).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    return (total / count).detach(), torch.cat([gradient.flatten() for gradient in gradients])


def rounded_close_to_exact(model, objective, examples):
    loss, gradient = loss_and_gradient(model, objective, examples, "float32")
    rounded, rounded_gradient = loss_and_gradient(model, objective, examples, "bf16")
    assert rounded.dtype == torch.float32
    assert rounded != loss
    assert_within(abs(rounded - loss), 1e-2 * loss)
    assert_within((rounded_gradient - gradient).norm(), NEAR * gradient.norm())


def dtypes_seen(model, objective, examples):
    """Return what goes into and out of each module of one forward pass in bf16: {(kind, dtype of floating tensors)}."""
    seen = set()

    def look(kind):
        def hook(module, inputs, output):
            tensors = [value for value in (*inputs, output) if isinstance(value, torch.Tensor)]
            seen.update((kind, tensor.dtype) for tensor in tensors if tensor.is_floating_point())

        return hook

    for block in model.blocks:
        block.register_forward_hook(look("state"))
        block.mixer_norm.register_forward_hook(look("norm"))
        block.ffn_norm.register_forward_hook(look("norm"))
    model.final_norm.register_forward_hook(look("norm"))
    model.head.register_forward_hook(lambda module, inputs, output: seen.add(("logits", output.dtype)))
    loss_and_gradient(model, objective, examples, "bf16")
    return seen


EXPECTED = {("state", torch.float32), ("norm", torch.float32), ("logits", torch.bfloat16)}


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_computes_in_bfloat16(lab, name):
    objective = "ar" if "bidirectional" not in Registry("mechanisms").load(name).directions else "mlm"
    parts = made(lab, mechanism={"name": name}, objective={"name": objective})
    rounded_close_to_exact(*parts)
    assert dtypes_seen(*parts) == EXPECTED


@pytest.mark.parametrize(("family", "key", "name"), OTHERS, ids=[f"{key}-{name}" for _, key, name in OTHERS])
def test_every_other_part_computes_in_bfloat16(lab, family, key, name):
    parts = made(lab, **{key: {"name": name}})
    if name != "bitnet":  # rounds by itself: what bfloat16 changes may move a weight to the next of its three values
        rounded_close_to_exact(*parts)
    assert dtypes_seen(*parts) == EXPECTED


def test_an_embedding_that_ends_in_a_product_begins_a_state_in_float32(lab):
    model, objective, examples = made(lab)
    model.embedding = nn.Sequential(model.embedding, nn.Linear(16, 16))
    assert dtypes_seen(model, objective, examples) == EXPECTED


def test_the_logits_are_products_of_rounded_factors(lab):
    model, objective, examples = made(lab)
    hidden = []
    model.head.register_forward_hook(lambda module, inputs, output: hidden.extend([inputs[0], output]))
    with torch.no_grad(), computing_in("bf16", CPU):
        objective.loss(model, examples)
    given, found = hidden
    factors = [tensor.bfloat16().double() for tensor in (given, model.head.weight, model.head.bias)]
    exact = factors[0] @ factors[1].T + factors[2]
    unit = torch.finfo(torch.bfloat16).eps
    assert_within((found.double() - exact).abs(), unit * exact.abs() + 1e-6)


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_a_constant_signal_goes_through_48_connections_unchanged(state):
    """Matrices rounded to bfloat16 lose 0.18 % of it at each connection of the published module. The branch adds
    nothing."""
    x = 1 + torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(0)).to(state)  # the same in every stream
    with torch.no_grad(), computing_in("bf16", CPU):
        connections = [shake(build("mhc_lite", width=8, layer=layer)) for layer in range(48)]
        streams = connections[0].enter(x)
        for connection in connections:
            streams = connection(streams, torch.zeros_like)
    assert streams.dtype == state
    torch.testing.assert_close(streams.float(), x.unsqueeze(-2).expand_as(streams).float(), rtol=1e-5, atol=0)


def test_a_run_in_bfloat16_resumes_bit_for_bit(lab, tmp_path_factory):
    spec = lab.spec(precision="bf16", steps=8)
    other = type(lab)(tmp_path_factory.mktemp("whole"))
    other.text.write_bytes(lab.text.read_bytes())
    whole = other.train(other.spec(precision="bf16", steps=8))
    lab.train(spec, steps=5)
    resumed = lab.train(spec)
    assert same(final_weights(resumed), final_weights(whole))
    assert resumed.metrics_file.read_bytes() == whole.metrics_file.read_bytes()
    rounded, exact = (list(read_jsonl(each.metrics_file))[1] for each in (whole, lab.train(lab.spec(steps=8))))
    assert rounded["step"] == 1
    assert rounded["loss"] != exact["loss"]
    assert all(weight.dtype == torch.float32 for weight in final_weights(resumed).values())


def test_validation_computes_in_the_precision_of_the_run(lab):
    """Of the initialisation, which is the same."""
    exact, rounded = (lab.train(lab.spec(precision=name, steps=1)) for name in ("float32", "bf16"))
    before = [next(read_jsonl(each.metrics_file))["val_nll"] for each in (exact, rounded)]
    assert before[0] != before[1]
    assert math.isclose(*before, rel_tol=1e-2)


def test_precision_is_in_a_run_s_id_but_for_float32(lab):
    plain = lab.spec()
    assert run_id(lab.spec(precision="float32")) == run_id(plain)
    assert len({run_id(lab.spec(precision=name)) for name in ("float32", "tf32", "bf16")}) == 3


def test_a_precision_that_is_named_twice_is_refused():
    assert read_spec("sweep", ["precision=[float32,bf16]"]).precision == ("float32", "bf16")
    with pytest.raises(ValueError, match=r"^precision=\[bf16,bf16\] names one twice; give each once$"):
        read_spec("sweep", ["precision=[bf16,bf16]"])


def test_tf32_is_refused_where_there_is_none(lab):
    with pytest.raises(ValueError, match=r"precision=tf32 is a mode of CUDA devices.*float32 or bf16"):
        lab.train(lab.spec(precision="tf32"))


def measured(lab, directory, **changes):
    settings = {
        "warmup_batches": 1,
        "warmup_steps": 0,
        "recorded_steps": 1,
        "parity_steps": 0,
        "state": ("checkpoint",),
    }
    loaded = Loaded.read(directory.checkpoints()[-1], lab.cache)
    probe = Probe(loaded, CurvatureSpec(**settings | changes), CPU)
    (row,) = [row for row in probe.rows("checkpoint") if row is not None]
    return row


def test_alpha_max_of_a_run_in_bfloat16_is_measured_in_float32_or_on_request_in_its_own(lab):
    """Against the same steps of the same checkpoint by double backward, which knows autocast from torch itself."""
    directory = lab.train(lab.spec(precision="bf16", steps=4))
    plain, own = measured(lab, directory), measured(lab, directory, precision="run")
    by_torch = measured(lab, directory, precision="run", method="double_backward")
    exact = measured(lab, directory, method="double_backward")
    assert plain["method"] == "taylor"
    assert math.isclose(plain["curvature"], exact["curvature"], rel_tol=1e-4)
    assert own["curvature"] != plain["curvature"]
    assert math.isclose(own["curvature"], by_torch["curvature"], rel_tol=NEAR)
    assert math.isclose(own["slope"], by_torch["slope"], rel_tol=NEAR)


def test_taylor_carries_derivatives_through_products_of_rounded_factors():
    """Of a square of a rounded map, by hand: u′Hu = 2‖Vx‖² with V the direction, each factor rounded once."""
    generator = torch.Generator().manual_seed(0)
    weight, step, x = (torch.randn(shape, generator=generator) for shape in ((6, 5), (6, 5), (7, 5)))

    def loss(params):
        with computing_in("bf16", CPU):
            return nn.functional.linear(x, params["weight"]).float().square().sum()

    found = directional(loss, {"weight": weight}, {"weight": step}, "taylor")
    exact = 2 * (x.bfloat16().double() @ step.bfloat16().double().T).square().sum().item()
    assert math.isclose(found.curvature, exact, rel_tol=1e-2)
