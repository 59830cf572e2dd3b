"""A loss of a part's own: in the training loss and in α_max's, not in the validation NLL, and exact however a batch is
cut."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as recomputed

from stability.build import build_model, build_objective
from stability.config.identity import run_id
from stability.curvature import directional
from stability.curvature.taylor import missing_rule
from stability.mechanisms import AbstractMechanism, WithLoss
from stability.mechanisms.two_way import TwoWay
from stability.models.block import Block
from stability.models.passes import computing_in
from stability.probes.checkpoints import Loaded
from stability.probes.curvature.checkpoint_descent import Probe
from stability.registry import add_plugin
from stability.residuals import build as build_residual
from stability.runs.directory import RunDirectory, read_jsonl
from stability.training.run import train
from tests.probes.test_alpha_max import SHORT

V = 6
BALANCE, EXPERTS = 0.5, 3
SMALL = {"name": "small", "layers": 2, "width": 4, "heads": 1, "positions": 5, "dropout": 0.0}
PLUGINS = ["tests.ffns.plugins.soft_mixture", "tests.training.weighted"]
# sequences weigh 1 to 4: a mean over sequences is not the mean of the loss
WEIGHTED = {"objective": {"name": "weighted"}, "ffn": "soft_mixture", "plugins": PLUGINS}


@pytest.fixture(autouse=True)
def plugins(plugins_of_a_test_alone):
    for module in PLUGINS:
        add_plugin(module)


def small(lab, balance=BALANCE, **changes) -> tuple[Any, Any, Any]:
    """A tiny model in float64, its objective, and six sequences of weights 1 to 4."""
    ffn = {"name": "soft_mixture", "balance": balance}
    spec = lab.spec(**{**WEIGHTED, "model": SMALL, "ffn": ffn, "batch": 6} | changes)
    model, objective = build_model(spec, V).double(), build_objective(spec, V)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    tokens_BN = torch.randint(V, (6, 5), generator=torch.Generator().manual_seed(1))
    examples = objective.examples(tokens_BN, torch.Generator().manual_seed(2))
    assert examples.weights_BN.sum(1).unique().numel() > 2
    return (
        model,
        objective,
        examples.map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor),
    )


def by_hand(model: Any, examples: Any, params: dict[str, Tensor], balance=BALANCE) -> tuple[Tensor, Tensor]:
    """(mean NLL, mean auxiliary loss) from what reaches each feed-forward network, written out."""
    reached: list[Tensor] = []
    handles = [block.ffn.register_forward_pre_hook(lambda _, args: reached.append(args[0])) for block in model.blocks]
    logits = functional_call(model, params, (examples.inputs_BN,))
    for handle in handles:
        handle.remove()
    loss_B = 0.0
    for layer, x_BND in enumerate(reached):
        scores = x_BND @ params[f"blocks.{layer}.ffn.router.weight"].T + params[f"blocks.{layer}.ffn.router.bias"]
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        loss_B = loss_B + balance * EXPERTS * ((weights.sum(1) / weights.shape[1]) ** 2).sum(-1)
    weight_B = examples.weights_BN.sum(1)
    nll = F.cross_entropy(logits.flatten(0, 1), examples.targets_BN.flatten(), reduction="none")
    nll = (nll * examples.weights_BN.flatten()).sum() / weight_B.sum()
    return nll, (weight_B * loss_B).sum() / weight_B.sum()


def parameters_of(model) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_the_training_loss_is_the_nll_and_the_balance_written_out(lab):
    model, objective, examples = small(lab)
    nll, auxiliary = by_hand(model, examples, parameters_of(model))
    found = objective.training_loss(model, examples)
    torch.testing.assert_close(found.total / found.count, nll + auxiliary, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.auxiliary / found.count, auxiliary, rtol=1e-12, atol=0)
    assert auxiliary > 2 * BALANCE, "two layers, each of them at least its weight"


def test_validation_and_every_other_reader_have_the_nll_alone(lab):
    model, objective, examples = small(lab)
    nll, _ = by_hand(model, examples, parameters_of(model))
    for total, count in (objective.loss(model, examples), objective.validate(model, examples)[:2]):
        torch.testing.assert_close(total / count, nll, rtol=1e-12, atol=0)
    assert isinstance(model(examples.inputs_BN), Tensor) and isinstance(examples.logits(model), Tensor)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_microbatches_add_up_to_the_batch(lab, rows):
    """4 and 2 sequences of other weights each: by autograd over the closed form of the whole batch."""
    model, objective, examples = small(lab)
    params = {name: tensor.requires_grad_() for name, tensor in parameters_of(model).items()}
    nll, auxiliary = by_hand(model, examples, params)
    expected = torch.autograd.grad(nll + auxiliary, list(params.values()))
    found = [objective.training_loss(model, part) for part in examples.split(rows)]
    count = objective.count(examples, torch.float64)
    gradient = torch.autograd.grad(sum(part.total for part in found) / count, list(model.parameters()))
    for one, two in zip(gradient, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(sum(part.auxiliary for part in found) / count, auxiliary, rtol=1e-12, atol=0)


def test_a_chunked_loss_and_a_part_that_is_computed_again_change_nothing(lab):
    model, objective, examples = small(lab)
    chunked = build_objective(lab.spec(**WEIGHTED | {"objective": {"name": "weighted", "loss_chunk": 3}}), V)
    plain = objective.training_loss(model, examples)
    expected = torch.autograd.grad(plain.total, list(model.parameters()))
    calls = []
    for block in model.blocks:
        compute = block.ffn.forward

        def again(x_BND, compute=compute):
            return recomputed(lambda x: calls.append(1) or compute(x), x_BND, use_reentrant=False)

        block.ffn.forward = again
    found = chunked.training_loss(model, examples)
    gradient = torch.autograd.grad(found.total, list(model.parameters()))
    assert len(calls) == 4, "twice a layer"
    torch.testing.assert_close(found.auxiliary, plain.auxiliary, rtol=1e-13, atol=0)
    for one, two in zip(gradient, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


def test_other_parameters_give_another_loss_and_leave_nothing_behind(lab):
    model, objective, examples = small(lab)
    before = [dict(vars(module)) for module in model.modules()]
    plain = objective.training_loss(model, examples)
    doubled = {name: 2 * tensor for name, tensor in parameters_of(model).items()}
    moved = objective.training_loss(model, examples, doubled)
    nll, auxiliary = by_hand(model, examples, doubled)
    torch.testing.assert_close(moved.total / moved.count, nll + auxiliary, rtol=1e-12, atol=0)
    again = objective.training_loss(model, examples)
    assert torch.equal(again.total, plain.total) and not torch.allclose(moved.auxiliary, plain.auxiliary)
    for module, held in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == held.keys()
        assert not any(isinstance(value, Tensor) for value in vars(module).values())


def test_slope_and_curvature_are_those_of_the_dense_hessian_of_the_closed_form(lab):
    """By both methods, whole and in parts, against one Hessian: it takes far longer than they do."""
    model, objective, examples = small(lab)
    params = parameters_of(model)
    generator = torch.Generator().manual_seed(5)
    direction = {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64) for name, tensor in params.items()
    }
    gradient, hessian = dense(model, examples, params)
    u = torch.cat([direction[name].flatten() for name in params])

    def loss(at, part):
        return objective.training_loss(model, part, at)[:2]

    assert missing_rule(loss, params, batches=[examples]) is None
    for method in ("taylor", "double_backward"):
        for parts in ([examples], examples.split(4)):
            found = directional(loss, params, direction, method, batches=parts)
            assert found.method == method
            assert found.slope == pytest.approx((gradient @ u).item(), rel=1e-9), (method, len(parts))
            assert found.curvature == pytest.approx((u @ hessian @ u).item(), rel=1e-9), (method, len(parts))
    at, first = gradient_of(model, examples, params, balance=0.0)
    (without,) = torch.autograd.grad(first @ u, at)
    assert abs((u @ hessian @ u - u @ without).item()) > 1e-2 * abs((u @ hessian @ u).item())


def gradient_of(model, examples, params, balance=BALANCE) -> tuple[Tensor, Tensor]:
    """All parameters side by side, and the gradient of the closed form to them, to be differentiated once more."""
    shapes = {name: tensor.shape for name, tensor in params.items()}
    flat = torch.cat([tensor.flatten() for tensor in params.values()]).requires_grad_()
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    at = {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}
    with sdpa_kernel(SDPBackend.MATH):
        nll, auxiliary = by_hand(model, examples, at, balance)
        (gradient,) = torch.autograd.grad(nll + auxiliary, flat, create_graph=True)
    return flat, gradient


def dense(model, examples, params) -> tuple[Tensor, Tensor]:
    """Gradient and Hessian of the closed form over all parameters, side by side."""
    flat, gradient = gradient_of(model, examples, params)
    rows = [torch.autograd.grad(each, flat, retain_graph=True)[0] for each in gradient]
    return gradient.detach(), torch.stack(rows)


def test_alpha_max_of_a_run_looks_at_the_same_loss(lab):
    """Along the u of its first recorded step, by differences of the closed form in float64."""
    spec, steps = lab.spec(**WEIGHTED), []
    folder = lab.train(spec).checkpoints()[-1]
    options: dict[str, Any] = {"observe": lambda step: steps.append(step) or {}}
    probe: Any = Probe(Loaded.read(folder, lab.cache), SHORT, torch.device("cpu"), **options)
    rows = [row for row in probe.rows("checkpoint") if row is not None]
    model = copy.deepcopy(probe.model).double()
    examples = probe.descent.examples(SHORT.warmup_batches + SHORT.warmup_steps)
    params, u = (
        {name: part.detach().double() for name, part in held.items()} for held in (steps[0].params, steps[0].direction)
    )
    h = 1e-3 / math.sqrt(sum(part.square().sum().item() for part in u.values()))

    def at(t, balance=BALANCE):
        moved = {name: part + t * u[name] for name, part in params.items()}
        return sum(part.item() for part in by_hand(model, examples, moved, balance))

    def curvature(**options):
        return (at(h, **options) - 2 * at(0.0, **options) + at(-h, **options)) / h**2

    assert rows[0]["loss_before"] == pytest.approx(at(0.0), rel=1e-5)
    assert rows[0]["slope"] == pytest.approx((at(h) - at(-h)) / (2 * h), rel=5e-3)
    assert rows[0]["curvature"] == pytest.approx(curvature(), rel=1e-2)
    assert abs(curvature() - curvature(balance=0.0)) > 0.05 * abs(curvature())


def test_a_run_logs_it_as_a_column_of_its_own_and_validates_without(lab):
    spec = lab.spec(**WEIGHTED, batch=6, microbatch=4)
    directory = lab.train(spec)
    rows = list(read_jsonl(directory.metrics_file))
    assert "auxiliary_loss" not in rows[0] and all(2 * BALANCE < row["auxiliary_loss"] < 3 for row in rows[1:])
    plain = list(
        read_jsonl(
            lab.train(
                lab.spec(**WEIGHTED | {"ffn": {"name": "soft_mixture", "balance": 0.0}}, batch=6, microbatch=4)
            ).metrics_file
        )
    )
    assert rows[1]["loss"] == pytest.approx(plain[1]["loss"] + rows[1]["auxiliary_loss"], rel=1e-6)
    assert rows[0]["val_nll"] == plain[0]["val_nll"] and rows[-1]["val_nll"] != plain[-1]["val_nll"]


def test_in_bfloat16_the_loss_is_made_in_float32_of_rounded_scores(lab):
    """By hand in float64 from the scores that the routers give, which are products in bfloat16."""
    model, objective, examples = small(lab)
    model.float()
    scores: list[Tensor] = []
    for block in model.blocks:
        block.ffn.router.register_forward_hook(lambda _, args, output: scores.append(output))
    with computing_in("bf16", "cpu"):
        found = objective.training_loss(model, examples)
    assert [each.dtype for each in scores] == [torch.bfloat16] * 2
    weight_B = examples.weights_BN.sum(1)
    loss_B = sum(EXPERTS * BALANCE * each.double().softmax(-1).mean(1).square().sum(-1) for each in scores)
    assert found.auxiliary.dtype == torch.float32
    torch.testing.assert_close(found.auxiliary.double(), (weight_B * loss_B).sum(), rtol=1e-6, atol=0)


def test_a_loss_that_is_made_in_bfloat16_is_refused(lab):
    model, objective, examples = small(lab)
    compute = model.blocks[0].ffn.forward
    model.blocks[0].ffn.forward = lambda x_BND: WithLoss(*(each.bfloat16() for each in compute(x_BND)))
    with pytest.raises(ValueError, match="an auxiliary loss is bfloat16; expected float32 or wider: at_least_float32"):
        objective.training_loss(model, examples)


def test_a_model_without_such_parts_logs_no_column(lab):
    rows = list(read_jsonl(lab.train(lab.spec(steps=4)).metrics_file))
    assert set(rows[-1]) == {"step", "loss", "grad_norm", "update_norm", "lr", "val_nll"}


def run(lab, spec, folder, **options):
    directory = RunDirectory(folder, run_id(spec))
    for _ in train(spec, directory, cache_dir=lab.cache, device="cpu", **options):
        pass
    return list(read_jsonl(directory.metrics_file))


@pytest.mark.slow  # two processes that import torch; tests/training/test_parallel.py keeps a plain run in the fast suite
def test_two_processes_give_the_bits_of_one(lab, tmp_path):
    spec = lab.spec(**WEIGHTED, batch=6, microbatch=2, steps=4)
    assert run(lab, spec, tmp_path / "shared", devices=2) == run(lab, spec, tmp_path / "alone")


class Charged(AbstractMechanism):
    """A mixer that returns its input, and for each sequence the mean of its squares."""

    def forward(self, x_BND, *, mask_BN=None):
        return WithLoss(x_BND, x_BND.square().mean((1, 2)))


@pytest.mark.parametrize("name", ["identity", "mhc_lite"])
def test_the_losses_of_mixer_and_ffn_add_up_whatever_the_residual_scheme(lab, name):
    model, _, _ = small(lab)
    ffn, x_BND = model.blocks[0].ffn, torch.randn(2, 5, 4, dtype=torch.float64)
    residuals = tuple(build_residual(name, width=4, layer=layer).double() for layer in range(2))
    block = Block(Charged(), ffn, norms=(nn.Identity(), nn.Identity()), residuals=residuals)
    seen: list[Tensor] = []
    handles = [
        part.register_forward_hook(lambda _, args, output: seen.append(output.loss_B)) for part in (block.mixer, ffn)
    ]
    found = block(residuals[0].enter(x_BND), None)
    for handle in handles:
        handle.remove()
    assert len(seen) == 2
    torch.testing.assert_close(found.loss_B, seen[0] + seen[1], rtol=1e-14, atol=0)


@pytest.mark.parametrize("mask_BN", [None, torch.ones(2, 5, dtype=torch.bool)])
def test_a_mechanism_read_both_ways_has_the_losses_of_both(mask_BN):
    both = TwoWay.__new__(TwoWay)
    nn.Module.__init__(both)
    both.mixers = nn.ModuleList([Charged(), Charged()])
    x_BND = torch.randn(2, 5, 4)
    found: Any = both(x_BND, mask_BN=mask_BN)
    torch.testing.assert_close(found.output, 2 * x_BND)
    torch.testing.assert_close(found.loss_B, 2 * x_BND.square().mean((1, 2)))


def test_a_loss_that_is_no_number_for_each_sequence_is_refused(lab):
    model, objective, examples = small(lab)
    compute = model.blocks[0].ffn.forward
    model.blocks[0].ffn.forward = lambda x_BND: WithLoss(compute(x_BND).output, x_BND.sum())
    with pytest.raises(
        ValueError, match=r"an auxiliary loss has shape \(\); expected \(B,\), a number for each sequence"
    ):
        objective.training_loss(model, examples)
