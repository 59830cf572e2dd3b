"""α_max of every optimizer's own step on a convex quadratic, where slope, curvature and α_max are closed forms of u, and
u is that of the paper's formula in plain numbers: nothing of what is compared with shares code with what is measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stability.config.curvature import CurvatureSpec
from stability.objectives import Examples
from stability.optimizers import set_lr
from stability.probes.curvature.descent import Descent
from stability.registry import Registry
from tests.optimizers import checks
from tests.optimizers.oracles import LOOPS, MODEL_LOOPS, TENSOR_LOOPS
from tests.optimizers.oracles.by_tensor import rest
from tests.optimizers.values import others

NAMES = Registry("optimizers").names()
MULTIPLES = (1.0, 2.0, 0.5, 1.5)  # of the rate, from step to step; the last is that of the measured one
# relative, of those that the library computes in float32 whatever the parameters are: Prodigy's two sums, SOAP's basis
WITHIN = {"prodigy": 1e-6, "soap": 1e-5}
# SOAP divides the gradient in its basis entry by entry by the root of that entry's square, and ε: of a gradient with a
# null space an entry is nearly 0, and half a float32 unit of the basis then changes uᵀHu by 1e-4 at ε = 5e-9, by 1e-7 here
CONDITIONED = {"soap": {"epsilon": 1e-2}}
EXAMPLES = Examples(*(torch.zeros(1, 1, dtype=torch.float64) for _ in range(3)))


class Bowl(checks.Toy):
    """The loss ½ Σ c (θ − T)² over all entries, c between 0.1 and 1, on a matrix, a vector and what a module tells of:
    gradients are those of the place that was reached."""

    def __init__(self):
        super().__init__()
        draws = torch.Generator().manual_seed(5)
        self.names = [name for name, _ in self.named_parameters()]
        shapes = [value.shape for value in self.parameters()]
        self.targets = [torch.randn(shape, generator=draws, dtype=torch.float64) for shape in shapes]
        self.curvatures = [torch.rand(shape, generator=draws, dtype=torch.float64) * 0.9 + 0.1 for shape in shapes]

    def loss(self, params: Any, _: Any = None) -> tuple[Tensor, Tensor]:
        terms = zip(self.names, self.curvatures, self.targets, strict=True)
        total = sum(0.5 * (curved * (params[name] - target) ** 2).sum() for name, curved, target in terms)
        return torch.as_tensor(total), torch.tensor(1.0, dtype=torch.float64)

    def gradients(self, values: list[np.ndarray]) -> list[np.ndarray]:
        terms = zip(self.curvatures, values, self.targets, strict=True)
        return [curved.numpy() * (value - target.numpy()) for curved, value, target in terms]


def by_formula(name: str, config: Any, bowl: Bowl, starts: list[np.ndarray], gradients: Any, rates: list[float]) -> Any:
    """Return all tensors after the steps by the formulas of `tests.optimizers.oracles`."""
    part = Registry("optimizers").load(name)
    told = [bowl.own_decay.get(key, part.decays(config, value)) for key, value in bowl.named_parameters()]
    configs = [config if each else config.model_copy(update={"weight_decay": 0.0}) for each in told]
    if name in MODEL_LOOPS:
        return MODEL_LOOPS[name](configs, starts, gradients, rates)
    found = []
    for number, (own, start) in enumerate(zip(configs, starts, strict=True)):
        drawn = [each[number] for each in gradients]
        if name in TENSOR_LOOPS:
            loop = TENSOR_LOOPS[name] if start.ndim == 2 or not part.takes_matrices else rest
            found.append(loop(own, start, drawn, rates))
            continue
        entries = [
            LOOPS[name](own, value, [each.flat[i].item() for each in drawn], rates)
            for i, value in enumerate(start.flatten().tolist())
        ]
        found.append(np.array(entries).reshape(start.shape))
    return found


@pytest.mark.parametrize("case", ["defaults", "others"])
@pytest.mark.parametrize("name", NAMES)
def test_alpha_max_is_that_of_the_formulas_step(name, case):
    if name not in {**LOOPS, **TENSOR_LOOPS, **MODEL_LOOPS}:
        pytest.skip(f"{name}: its steps are compared with no formula; add its loop to tests/optimizers/oracles")
    part, bowl = Registry("optimizers").load(name), Bowl()
    config = part.Config(**(others(name) if case == "others" else {}) | CONDITIONED.get(name, {}))
    rates = [checks.rate_of(part) * multiple for multiple in MULTIPLES]
    starts = [value.detach().numpy().copy() for value in bowl.parameters()]
    params: dict[str, Tensor] = dict(bowl.named_parameters())

    optimizer = checks.built(part, config, bowl)
    for rate in rates[:-1]:
        set_lr(optimizer, rate)
        optimizer.zero_grad()
        bowl.loss(params)[0].backward()
        checks.give_hessian(optimizer, bowl)
        optimizer.step()
    protocol = CurvatureSpec(warmup_batches=1, warmup_steps=0, recorded_steps=1)
    measured = checks.built(part, config, bowl)  # its state is that of the file alone
    descent = Descent(params, measured, bowl.loss, lambda _: EXAMPLES, protocol, lr=rates[-1], clip_norm=1e9)
    (row,) = descent.rows("checkpoint", optimizer.state_dict())
    assert row is not None

    values, drawn = [starts], []
    for step in range(1, len(rates) + 1):
        drawn.append(bowl.gradients(values[-1]))
        values.append(by_formula(name, config, bowl, starts, drawn, rates[:step]))
    u = [(after - before) / rates[-1] for after, before in zip(values[-1], values[-2], strict=True)]
    slope = sum(float((gradient * each).sum()) for gradient, each in zip(drawn[-1], u, strict=True))
    curved = sum(float((each.numpy() * own**2).sum()) for each, own in zip(bowl.curvatures, u, strict=True))
    size = sum(float((each**2).sum()) for each in u) / sum(each.size for each in u)
    within = WITHIN.get(name, 1e-9)
    assert (row["slope"], row["curvature"]) == pytest.approx((slope, curved), rel=within)
    assert row["alpha_max"] == pytest.approx(max(0.0, -2 * slope / curved), rel=within)
    assert row["rms_u"] == pytest.approx(size**0.5, rel=within)
    assert row["method"] == "taylor" and row["lr"] == rates[-1]
