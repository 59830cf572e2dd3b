"""A wider model whose units are copies of the base model's trains as the base model does, under `mup`.

Each growing axis repeats its entries m times, and maps that sum over a copied axis are divided by m. Such a model
computes the base model's function, and it stays one of copies if and only if every tensor has the right learning rate,
decay, ε and forward multiplier. So both losses agree at every step, by arithmetic alone and without the formulas.
"""

from __future__ import annotations

import pytest
import torch

from stability.build import build_model, build_optimizer
from tests.reading import read_spec, replaced

BASE, M, TOKENS = 32, 3, 8
OPTIMIZERS = {
    "adamw": ["optimizer.adamw.weight_decay=0.1", "optimizer.adamw.epsilon=1e-3"],
    "lion": [],
    "sgd": ["optimizer.sgd.weight_decay=0.01"],
    "muon": ["optimizer.muon.weight_decay=0.1", "optimizer.muon.rest_epsilon=1e-3"],
}
SA, GLA, PLAIN = "mechanism=[sa]", "mechanism=[gla] objective=ar", "optimizer.adamw.epsilon=1e-12"
CASES = [
    *(("adamw", f"mechanism=[{name}] objective=ar") for name in ("sa", "gla", "kda", "fox", "titans")),
    ("adamw", "mechanism=[sc]"),
    ("adamw", f"mechanism=[mamba] objective=ar {PLAIN}"),  # its map to Δ, B and C grows in part, its ε does not
    ("lion", SA),
    *((optimizer, words) for optimizer in ("sgd", "muon") for words in (SA, GLA)),
    ("adamw", f"{SA} residual=[hc]"),
    ("sgd", f"{SA} residual=[mhc]"),
    ("adamw", f"{SA} residual=[ode]"),
    ("adamw", f"{SA} model.tied=true position=learned norm=[dyt]"),
    ("adamw", f"{SA} model.embedding_width=8 ffn=glu ffn.multiple=3 norm=[rmsnorm]"),
]


def run_at(width, words, optimizer):
    of = ["parametrization=[mup]", f"parametrization.mup.base_width={BASE}", "model.head_width=16", "model.layers=2"]
    every = ["lr=1e-3", "hessian=false", "model.positions=12", f"model.width={width}", f"optimizer=[{optimizer}]"]
    spec = read_spec("sweep", replaced([*every, *of, *OPTIMIZERS[optimizer]], *words.split()))
    ((_, run),) = spec.kinds()
    return run.model_copy(update={"lr_peak": 3e-3})


def copy_units(base, wide):
    """Give the wide model the base model's values: growing axes repeated, maps divided by what they sum over."""
    given = dict(base.named_parameters())
    for name, parameter in wide.named_parameters():
        value, (path, _, leaf) = given[name].detach(), name.rpartition(".")
        of_residual = path.endswith("_residual") and leaf in ("weight", "gain")  # rows: D of each stream or branch
        before, after = fused_rows(base, path, len(value)), fused_rows(wide, path, len(parameter))
        if of_residual:
            before, after = ([width] * (len(value) // BASE) for width in (BASE, M * BASE))
        for axis, grown in enumerate(parameter.shape):
            times = [1] * value.ndim
            if axis:
                times[axis] = grown // value.shape[axis]
                value = value.repeat(times)
            else:
                parts = zip(value.split(before), after, strict=True)
                value = torch.cat([part.repeat(rows // len(part), *times[1:]) for part, rows in parts])
        if isinstance(wide.get_submodule(path), torch.nn.Linear) and value.ndim == 2 and path != "head":
            value = value * given[name].shape[1] / value.shape[1]
        if of_residual and leaf == "weight":
            value = value / M
        parameter.data.copy_(value)


def fused_rows(model, path, rows):
    """Rows of each part of a fused map, and of the convolution of as many channels; else all rows."""
    own = getattr(model.get_submodule(path.rpartition(".")[0]), "own_splits", {})
    return next((list(parts) for parts in own.values() if sum(parts) == rows), [rows])


def losses_of(run, model, steps=4):
    optimizer, losses = build_optimizer(run, model), []
    tokens = torch.randint(TOKENS, (2, 13), generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize(("optimizer", "words"), CASES)
def test_a_model_of_copies_trains_as_the_base_model(optimizer, words):
    runs = [run_at(width, words, optimizer) for width in (BASE, M * BASE)]
    base, wide = (build_model(run, TOKENS).double() for run in runs)
    generator = torch.Generator().manual_seed(1)
    for parameter in base.parameters():  # nothing begins at zero
        parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    copy_units(base, wide)
    before, after = (losses_of(run, model) for run, model in zip(runs, (base, wide), strict=True))
    assert abs(before[-1] - before[0]) > 1e-3
    assert after == pytest.approx(before, rel=1e-9)
