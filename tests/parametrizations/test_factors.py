"""The factors of each parametrization, against the package `mup` where it is installed, and against its formulas written
out for every parameter of four mechanisms at three widths."""

from __future__ import annotations

import math
import shutil

import pytest
import torch

from stability.build import build_model, build_optimizer
from stability.config.identity import run_id
from stability.models.init import without_memory
from stability.optimizers import roles
from stability.training import checkpoint
from tests.reading import read_spec

WIDTHS, HEAD, BASE = (64, 128, 256), 16, 32
MECHANISMS = ("sa", "gla", "mamba", "sc")
SIZES = [(mechanism, width) for mechanism in MECHANISMS for width in WIDTHS]


def run_of(*words):
    causal = ["objective=ar"] if {"mechanism=[gla]", "mechanism=[mamba]"} & set(words) else []
    spec = read_spec("sweep", ["lr=1e-3", "hessian=false", "model.layers=2", *causal, *words])
    ((_, run),) = spec.kinds()
    return run


def run_at(mechanism, width, *words, name="mup"):
    of = [f"parametrization=[{name}]", f"parametrization.{name}.base_width={BASE}"]
    return run_of(f"mechanism=[{mechanism}]", f"model.width={width}", f"model.head_width={HEAD}", *of, *words)


def standard_shapes(mechanism, width):
    words = [f"mechanism=[{mechanism}]", f"model.width={width}", f"model.head_width={HEAD}"]
    with without_memory():
        model = build_model(run_of(*words), 256)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def decays_of(mechanism, width):
    """Weight decay of each parameter in the standard parametrization: some have none."""
    run = run_of(f"mechanism=[{mechanism}]", f"model.width={width}", f"model.head_width={HEAD}")
    model = build_model(run, 256)
    found = settings_of(build_optimizer(run, model))
    return {name: found[id(parameter)][1] for name, parameter in model.named_parameters()}


def settings_of(optimizer):
    """Learning rate, decay and ε of each parameter, by id."""
    return {
        id(parameter): (group["lr"], group["weight_decay"], group.get("eps"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize(("mechanism", "width"), SIZES)
def test_rates_decay_and_epsilon_of_adamw_are_those_of_the_formulas(mechanism, width):
    """Matrices: rate 1/m_in, decay m_in; all else as it was; ε 1/m, but of tensors without a growing axis.

    The map to gla's gate of low rank, which sums over the width, has the rate of a matrix.
    """
    run = run_at(mechanism, width)
    model, before = build_model(run, 256), standard_shapes(mechanism, BASE)
    found, m = settings_of(build_optimizer(run, model)), width / BASE
    decays = decays_of(mechanism, width)
    for name, parameter in model.named_parameters():
        grown = [here / there for here, there in zip(parameter.shape, before[name], strict=True) if here != there]
        to_gate = name.endswith("forget_down.weight")
        rate = 1 / grown[-1] if len(grown) == 2 or to_gate else 1.0
        lr, weight_decay, epsilon = found[id(parameter)]
        assert lr == pytest.approx(rate * run.lr_peak), name
        assert epsilon == pytest.approx(1e-8 / m if grown and not to_gate else 1e-8, abs=0), name
        assert weight_decay == pytest.approx(decays[name] / rate), name


@pytest.mark.parametrize(("mechanism", "width"), SIZES)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_rates_and_decay_are_those_of_the_package(mechanism, width, optimizer):
    """A map before the head to a fixed axis must be a `MuReadout` there, as `set_base_shapes` asserts.

    That is y = W′x/m with W′ = mW, so a rate r of W′ is r/m of W under Adam, r/m² under SGD.
    """
    mup = pytest.importorskip("mup", reason="the package mup is not installed")
    words = ["optimizer=[sgd]", "optimizer.sgd.weight_decay=0.01"] if optimizer == "sgd" else []
    run = run_at(mechanism, width, *words)
    model, shapes = build_model(run, 256), [f"mechanism=[{mechanism}]", f"model.head_width={HEAD}"]
    base, delta = (build_model(run_of(*shapes, f"model.width={each}"), 256) for each in (BASE, 2 * BASE))
    mup.set_base_shapes(model, base, delta=delta, rescale_params=False, do_assert=False)
    kind = mup.MuAdamW if optimizer == "adamw" else mup.MuSGD
    theirs = settings_of(kind(model.parameters(), lr=run.lr_peak, weight_decay=0.01))
    ours = settings_of(build_optimizer(run, model))
    decays = decays_of(mechanism, width)
    for name, parameter in model.named_parameters():
        (lr, decay, _), (their_lr, their_decay, _) = ours[id(parameter)], theirs[id(parameter)]
        is_linear = isinstance(model.get_submodule(name.rpartition(".")[0]), torch.nn.Linear)
        if is_linear and [axis.isinf() for axis in parameter.infshape] == [False, True] and name != "head.weight":
            shift = parameter.infshape.width_mult() ** (1 if optimizer == "adamw" else 2)
            their_lr, their_decay = their_lr / shift, their_decay * shift
        assert lr == pytest.approx(their_lr), name
        assert decay == pytest.approx(their_decay if decays[name] else 0.0), name


@pytest.mark.parametrize("rule", ["ours", "nanogpt", "torch"])
def test_initial_values_of_hidden_matrices_fall_with_the_width_and_the_heads_do_not(rule):
    """Standard deviations at two widths: matrices ∝ 1/√width, embedding and head equal; the head's input falls as 1/m."""
    found = {}
    for width in (64, 256):
        model = build_model(run_at("sa", width, f"model.init={rule}", "model.embedding_std=1", "model.qk_bias=0"), 256)
        names = ("embedding.weight", "head.weight", "blocks.0.ffn.hidden.weight", "blocks.0.mixer.qkv.weight")
        held = dict(model.named_parameters())
        found[width] = [float(held[name].detach().std()) for name in names if name in held] + [model.readout_scale]
    embedding, head, *matrices, scale = (large / small for small, large in zip(*found.values(), strict=True))
    assert scale == 1 / 4
    assert embedding == pytest.approx(1, rel=0.03) and head == pytest.approx(1, rel=0.03)
    assert matrices and all(each == pytest.approx(1 / 2, rel=0.03) for each in matrices)


@pytest.mark.parametrize("rule", ["ours", "torch", "nanogpt", "sedd"])
def test_initial_values_of_every_kind_of_map_have_their_exponent(rule):
    """gla: tables and maps from a fixed axis keep their deviation; matrices −½; the map to the gate of low rank −1."""
    exponents = {"qkv": -1 / 2, "forget": 0, "forget_down": -1, "out": -1 / 2}
    expected = {f"blocks.0.mixer.{name}.weight": each for name, each in exponents.items()}
    expected |= {"embedding.weight": 0, "embedding.projection.weight": 0}
    if rule in ("torch", "sedd"):
        expected["blocks.0.ffn.hidden.bias"] = 0
    for words in ([], ["model.embedding_width=32"]):
        stds = []
        for width in (64, 256):
            model = build_model(run_at("gla", width, f"model.init={rule}", *words), 256)
            stds.append({name: float(each.detach().std()) for name, each in model.named_parameters()})
        for name in expected.keys() & stds[0].keys():
            assert math.log(stds[1][name] / stds[0][name], 4) == pytest.approx(expected[name], abs=0.08), name


def test_a_head_of_zeros_is_one_at_the_base_size_too():
    """The standard model has none, so the base is a run of its own."""
    words = ["lr=1e-3", "hessian=false", "mechanism=[sa]", "parametrization=[mup]", "parametrization.mup.readout=zero"]
    kinds = read_spec("sweep", [*words, "model.width=[32,64]", "model.head_width=16"]).kinds()
    assert [(run.model.width, run.parametrization.name) for _, run in kinds] == [(32, "mup"), (64, "mup")]
    assert all(not build_model(run, 256).head.weight.any() for _, run in kinds)


def test_a_model_of_the_base_size_is_the_standard_one():
    """The same run: the same id, and nothing that differs."""
    words = ("mechanism=[sa]", f"model.width={BASE}", f"model.head_width={HEAD}")
    plain = run_of(*words)
    for name in ("mup", "layerwise", "complete_p"):
        given = [f"parametrization=[{name}]", f"parametrization.{name}.base_width={BASE}"]
        own = run_of(*words, *given, *(["parametrization.complete_p.base_depth=2"] if name == "complete_p" else []))
        assert run_id(own) == run_id(plain) and own.parametrization.name == "standard"


def test_both_parametrizations_of_a_sweep_share_the_runs_of_the_base_size():
    words = ["lr=1e-3", "hessian=false", "mechanism=[sa]", "parametrization=[standard,mup]"]
    kinds = read_spec("sweep", [*words, "model.width=[32,64]", "model.head_width=16"]).kinds()
    assert [(run.model.width, run.parametrization.name) for _, run in kinds] == [
        (32, "standard"), (64, "standard"), (64, "mup"),
    ]  # fmt: skip
    assert kinds[-1][1].parametrization.settings.base_width == 32


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_branches_and_blocks_of_complete_p_scale_with_the_depth(optimizer):
    """α = ½: branches L̂^−½; rates in blocks L̂^−½ (Adam), 1 (SGD); ε in blocks L̂^−½; all else as it was."""
    of = [
        "parametrization=[complete_p]",
        "parametrization.complete_p.base_depth=2",
        "parametrization.complete_p.alpha=0.5",
    ]
    words = ["mechanism=[sa]", "model.width=32", "model.head_width=16", "model.layers=8", f"optimizer=[{optimizer}]"]
    spec = read_spec("sweep", ["lr=1e-3", "hessian=false", *words, *of, "parametrization.complete_p.base_width=32"])
    ((_, run),) = spec.kinds()
    model = build_model(run, 256)
    assert all(block.branch_scale == 1 / 2 for block in model.blocks) and model.readout_scale == 1
    found = settings_of(build_optimizer(run, model))
    for name, parameter in model.named_parameters():
        rate = 0.5 if optimizer == "adamw" and name.startswith("blocks.") else 1.0
        assert found[id(parameter)][0] == pytest.approx(rate * run.lr_peak), name
        if optimizer == "adamw":
            assert found[id(parameter)][2] == pytest.approx(1e-8 * (0.5 if name.startswith("blocks.") else 1.0)), name


def test_branch_outputs_of_complete_p_begin_as_at_the_base_depth():
    """The branch's factor replaces the initialisation's 1/√branches; left in, the depth would count twice."""
    of = [
        "parametrization=[complete_p]",
        "parametrization.complete_p.base_depth=2",
        "parametrization.complete_p.base_width=32",
    ]
    words = ["mechanism=[sa]", "model.width=32", "model.head_width=16"]
    spec = read_spec("sweep", ["lr=1e-3", "hessian=false", *words, *of, "model.layers=8"])
    ((_, deep),) = spec.kinds()
    shallow = run_of(*words)
    stds = [float(build_model(run, 256).blocks[0].mixer.out.weight.detach().std()) for run in (deep, shallow)]
    assert stds[0] == pytest.approx(stds[1], rel=0.05)


def test_rates_of_layerwise_are_everetts():
    """Adam: embedding 1, hidden 1/m, head 1/m; SGD: √m, 1/√m, 1/m."""
    for optimizer, (table, hidden, head) in {"adamw": (1, 1 / 4, 1 / 4), "sgd": (2, 1 / 2, 1 / 4)}.items():
        run = run_at("sa", 128, f"optimizer=[{optimizer}]", name="layerwise")
        model = build_model(run, 256)
        assert model.readout_scale == 1 and {each.init for each in model.factors.values()} == {1.0}
        of_role = {name: model.factors[name].lr for name, role in roles(model).items()}
        assert of_role["head.weight"] == head and of_role["embedding.weight"] == table
        assert of_role["blocks.0.mixer.out.weight"] == hidden


@pytest.mark.parametrize(("scale", "factor"), [("original", 1.0), ("match_rms_adamw", 1 / 2)])
def test_muons_matrices_keep_the_spectral_condition(scale, factor):
    """‖ΔW‖₂ ∝ √(fan-out/fan-in): a square that grows fourfold keeps it, against the optimizer's own √width of the other."""
    run = run_at("sa", 128, "optimizer=[muon]", f"optimizer.muon.scale={scale}")
    model = build_model(run, 256)
    assert model.factors["blocks.0.mixer.out.weight"].lr == pytest.approx(factor)
    assert model.factors["head.weight"].lr == model.factors["embedding.weight"].lr == 1
    optimizer = build_optimizer(run, model)
    lr = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert lr[id(model.blocks[0].mixer.out.weight)] == pytest.approx(factor * run.lr_peak)


def test_a_step_of_the_optimizer_uses_the_factors():
    """AdamW's first step moves each entry by its own rate, whatever the gradient."""
    run = run_at("sa", 128, "optimizer.adamw.weight_decay=0")
    model = build_model(run, 256)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(run, model)
    tokens = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(0))
    torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    for name in ("head.weight", "blocks.1.ffn.hidden.weight", "blocks.0.mixer.out.weight"):
        moved = (dict(model.named_parameters())[name] - before[name]).detach().abs()
        assert float(moved.median()) == pytest.approx(model.factors[name].lr * run.lr_peak, rel=0.02), name


def test_the_output_scale_enters_the_logits_and_the_loss_that_never_computes_them():
    run = run_at("sa", 128)
    model = build_model(run, 256)
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    scaled = model(tokens)
    seen = []
    model(tokens, readout=lambda hidden, weight, bias: seen.append(hidden) or hidden)
    model.readout_scale = 1.0
    bias = model.head.bias
    assert torch.allclose(scaled - bias, (model(tokens) - bias) / 4, atol=1e-6)
    assert torch.allclose(seen[0] @ model.head.weight.T + bias, scaled, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parametrization=[mup]"], "parametrization=mup needs a base size: give several sizes"),
        (["parametrization=[mup]", "parametrization.mup.base_width=24", "model.width=64", "model.head_width=16"], "must be a multiple of the heads' width, 16"),
        (["parametrization=[mup]", "parametrization.mup.base_width=32", "model.width=64", "model.head_width=16", "optimizer=[lamb]"], "optimizer=lamb has no factors in parametrization=mup"),
        (["parametrization=[complete_p]", "model.layers=[2,4]", "residual=[hc]"], "scales the branches of residual=identity or ode"),
        (["parametrization=[layerwise]", "model.width=[32,64]", "model.head_width=16", "model.tied=true"], "with model.tied=true they are one matrix"),
        (["parametrization=[mup]", "parametrization.mup.readout=zero", "model.width=[32,64]", "model.head_width=16", "model.tied=true"], "choose one of them"),
        (["parametrization=[mupp]", "model.width=[32,64]"], "did you mean 'mup'"),
    ],
)  # fmt: skip
def test_what_no_factor_exists_for_is_refused_in_one_line(words, message):
    with pytest.raises(ValueError, match=".*") as error:
        read_spec("sweep", ["mechanism=[sa]", "lr=1e-3", "hessian=false", *words]).kinds()
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["mup", "complete_p"])
def test_a_run_with_factors_resumes_bit_for_bit(lab, name):
    depth = {"base_depth": 1} if name == "complete_p" else {}
    part = {"name": name, "base_width": 16, **depth}
    spec = lab.spec(
        model={"name": "tiny", "layers": 2, "width": 32, "heads": 2, "positions": 16},
        parametrization=part,
        optimizer={"name": "adamw", "weight_decay": 0.0},
    )
    whole = lab.train(spec)
    lines = whole.metrics_file.read_bytes()
    weights = checkpoint.load(whole.checkpoints()[-1])[1].state_dict()
    shutil.rmtree(whole.path)
    lab.train(spec, steps=spec.steps // 2)
    again = lab.train(spec)
    assert again.metrics_file.read_bytes() == lines
    found = checkpoint.load(again.checkpoints()[-1])[1]
    assert all(torch.equal(weights[key], value) for key, value in found.state_dict().items())
    assert found.factors and found.readout_scale == 1 / 2, "a loaded model keeps its parametrization"
