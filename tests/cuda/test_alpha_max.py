"""α_max on CUDA is α_max on a CPU: slope and uᵀHu in float64 to 1e-9, by Taylor's pass and by double backward."""

from __future__ import annotations

import pytest

from stability.curvature import directional
from stability.registry import Registry
from tests.cuda import DEVICE, here
from tests.curvature import test_dense_oracle as oracle
from tests.within import assert_within

NAMES = here(Registry("mechanisms").names(cross=False, trainable=True), ("sa", "sc"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["taylor", "double_backward"])
def test_slope_and_curvature_on_this_device_are_those_of_a_cpu_in_float64(name, method):
    """Held to a double backward on the CPU, which tests/curvature holds to dense Hessians. Sums that cancel are compared
    with the norms of their factors: 1e-9 is a million units of float64's rounding of them."""
    direction = "mlm" if "bidirectional" in _directions(name) else "ar"
    spec = oracle.spec_of(name, "layernorm", direction)
    plain, objective = oracle.shaken_model(spec, 1.0), oracle.build_objective(spec, oracle.format_for(spec))
    examples = oracle.batch_of(spec, 0)
    exact = oracle.loss_of(plain, objective, examples)
    params = {key: each.detach() for key, each in plain.named_parameters()}
    u = oracle.optimizer_step(spec, plain, [exact])
    truth, product = directional(exact, params, u, "double_backward"), oracle.hvp(exact, params, u)
    there = [{key: each.to(DEVICE) for key, each in tensors.items()} for tensors in (params, u)]
    moved = oracle.loss_of(plain.to(DEVICE), objective, examples.to(DEVICE))
    found = directional(moved, *there, method)
    size = float(oracle.flatten(u).norm())
    assert_within(abs(found.slope - truth.slope), 1e-9 * max(abs(truth.slope), size))
    assert_within(abs(found.curvature - truth.curvature), 1e-9 * size * float(oracle.flatten(product).norm()))


def _directions(name):
    mechanism = Registry("mechanisms").load(name)
    return mechanism.supported_directions(mechanism.Config())
