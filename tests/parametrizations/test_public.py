"""`complete_p` beside nanoGPT-mup's code, `mup` beside u-µP's: each side's factors, written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from stability.build import build_model, build_optimizer
from tests.reading import read_spec

BASE, BASE_DEPTH, TOKENS = 32, 2, 64
GPT = ["mechanism=[sa]", "objective=ar", "model.init=nanogpt", "model.tied=true", "model.head_bias=false"]


def run_at(width, layers, *words, name="complete_p"):
    of = [f"parametrization=[{name}]", f"parametrization.{name}.base_width={BASE}", "model.head_width=16"]
    if name == "complete_p":
        of.append(f"parametrization.complete_p.base_depth={BASE_DEPTH}")
    size = [f"model.width={width}", f"model.layers={layers}"]
    ((_, run),) = read_spec("sweep", ["lr=1e-3", "hessian=false", *size, *of, *words]).kinds()
    return run


def settings_of(run, model):
    """Learning rate over the run's, weight decay, and ε of each parameter by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: (group["lr"] / run.lr_peak, group["weight_decay"], group.get("eps"))
        for group in build_optimizer(run, model).param_groups
        for parameter in group["params"]
    }


def nanogpt_group(name, m, depth, alpha):
    """Learning rate and weight decay of a parameter as `configure_optimizers` groups it, over the base's."""
    if name == "embedding.weight":  # wte, which is the head, too
        return 1.0, 1.0
    if name.startswith("final_norm."):  # ln_f
        return 1.0, 0.0
    if name.endswith((".qkv.weight", ".hidden.weight", ".out.weight")):  # c_attn, c_fc, c_proj
        return depth ** (alpha - 1) / m, m
    assert name.endswith((".bias", "_norm.weight")), name  # ln_1, ln_2, biases of c_attn, c_fc, c_proj
    return depth ** (alpha - 1), 0.0


@pytest.mark.parametrize("alpha", [0.5, 1])
@pytest.mark.parametrize("layers", [2, 4, 8])
@pytest.mark.parametrize("width", [64, 128])
def test_factors_of_complete_p_are_those_of_nanogpt_mup(width, layers, alpha):
    """github.com/EleutherAI/nanoGPT-mup, branch completep at 6f8bc3b, model.py.

    Two differences, on purpose. Its ε outside the blocks falls as L̂^−α, too, against Table 1 of the paper and the
    gradients (next test). Its branch outputs begin without the factor 1/√(2·layers); ours have that of the base depth.
    Both are the same at every depth.
    """
    run = run_at(width, layers, *GPT, f"parametrization.complete_p.alpha={alpha}", "optimizer.adamw.weight_decay=0.1")
    model, m, depth = build_model(run, TOKENS), width / BASE, layers / BASE_DEPTH
    found = settings_of(run, model)
    for name, parameter in model.named_parameters():
        lr, decay = nanogpt_group(name, m, depth, alpha)
        is_decayed = decay and found[name][1]  # which tensors decay at all is the optimizer's own choice
        epsilon = 1e-8 / m * (depth**-alpha if name.startswith("blocks.") else 1.0)
        assert found[name][0] == pytest.approx(lr, abs=0), name
        assert not is_decayed or found[name][1] == pytest.approx(0.1 * decay, abs=0), name
        assert found[name][2] == pytest.approx(epsilon, abs=0), name
        if parameter.ndim == 2:
            std = 0.02 if name == "embedding.weight" else 0.02 / math.sqrt(m)
            std /= math.sqrt(2 * BASE_DEPTH) if name.endswith(".out.weight") else 1.0
            assert float(parameter.detach().std()) == pytest.approx(std, rel=0.05), name
    assert [block.branch_scale for block in model.blocks] == pytest.approx([depth**-alpha] * layers)
    assert model.readout_scale == pytest.approx(1 / m)


def gradients_at(layers, alpha, optimizer="adamw"):
    """Gradients of a model at its start, by name; the model; its factors."""
    run = run_at(BASE, layers, "mechanism=[sa]", "objective=ar", f"parametrization.complete_p.alpha={alpha}", f"optimizer=[{optimizer}]")  # fmt: skip
    model = build_model(run, TOKENS)
    tokens = torch.randint(TOKENS, (8, 17), generator=torch.Generator().manual_seed(0))
    torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, settings_of(run, model)


def slope(low, high, growth):
    return math.log(high / low) / math.log(growth)


def test_the_gradients_of_blocks_alone_fall_with_the_depth():
    """As Adam's ε does: RMS ∝ L̂^−1 in blocks, and as large at every depth in embedding, last norm and head."""
    found = [gradients_at(layers, 1)[0] for layers in (4, 16)]
    for part in ("embedding.", "final_norm.", "head.", "blocks.0.mixer.", "blocks.0.ffn."):
        rms = [torch.cat([g.flatten() for name, g in each.items() if name.startswith(part)]).square().mean().sqrt() for each in found]  # fmt: skip
        assert slope(*rms, 4) == pytest.approx(-1 if part.startswith("blocks.") else 0, abs=0.25), part


@pytest.mark.parametrize("alpha", [0.5, 1])
@pytest.mark.parametrize(("optimizer", "power"), [("lion", 1), ("sgd", 2)])
def test_a_step_of_all_blocks_lowers_the_loss_by_as_much_at_every_depth(optimizer, power, alpha):
    """To first order by Σ lr·|g| for steps along the sign, by Σ lr·g² for steps along the gradient."""
    falls = []
    for layers in (4, 16):
        gradients, settings = gradients_at(layers, alpha, optimizer)
        inside = [name for name in gradients if name.startswith("blocks.")]
        falls.append(sum(settings[name][0] * float(gradients[name].abs().pow(power).sum()) for name in inside))
    assert slope(*falls, 4) == pytest.approx(0, abs=0.25)


# u-µP (Blake et al. 2024, arXiv:2407.17465): exponents of the width of forward multiplier, initial deviation and Adam's
# rate. Only forward + initial and forward + rate change a model; the rest is symmetry (a shift by θ).
UMUP = {"embedding": (0, 0, -1 / 2), "hidden": (-1 / 2, 0, -1 / 2), "gain": (0, 0, 0), "head": (-1, 0, 0)}
OURS = {
    "embedding": "embedding.weight",
    "hidden": "blocks.0.mixer.out.weight",
    "gain": "blocks.0.ffn_norm.weight",
    "head": "head.weight",
}


@pytest.mark.parametrize("part", UMUP)
def test_exponents_are_those_of_unit_mup(part):
    """But for the embedding's rate, on purpose: u-µP lets it fall as 1/√width, where µP's is flat."""
    found = []
    for width in (64, 256):
        run = run_at(width, 2, "mechanism=[sa]", "objective=ar", name="mup")
        model = build_model(run, TOKENS)
        weight, lr = model.get_parameter(OURS[part]).detach(), settings_of(run, model)[OURS[part]][0]
        found.append((model.readout_scale if part == "head" else 1.0, float(weight.square().mean().sqrt()), lr))
    forward, initial, lr = (slope(low, high, 4) for low, high in zip(*found, strict=True))
    their_forward, their_initial, their_lr = UMUP[part]
    assert forward + initial == pytest.approx(their_forward + their_initial, abs=0.05)
    assert forward + lr == pytest.approx(their_forward + their_lr + (1 / 2 if part == "embedding" else 0))


@pytest.mark.parametrize("part", UMUP)
def test_those_exponents_are_the_packages(part):
    uu = pytest.importorskip("unit_scaling", reason="the package unit-scaling is not installed")
    found = []
    for width in (64, 256):
        torch.manual_seed(0)
        module = {
            "embedding": lambda n: uu.Embedding(TOKENS, n),
            "hidden": lambda n: uu.Linear(n, n),
            "gain": lambda n: uu.LayerNorm(n, elementwise_affine=True),
            "head": lambda n: uu.LinearReadout(n, TOKENS),
        }[part](width)
        initial = float(module.weight.detach().square().mean().sqrt())
        (group, *_) = uu.optim.AdamW(module.parameters(), lr=1.0).param_groups
        module.weight.data.fill_(1.0)
        forward = float(module(torch.ones(1, width)).detach().mean()) / width if part in ("hidden", "head") else 1.0
        found.append((forward, initial, float(group["lr"])))
    exponents = [slope(low, high, 4) for low, high in zip(*found, strict=True)]
    assert exponents == pytest.approx(list(UMUP[part]), abs=0.02)
