"""Every trained mechanism in float32 on CUDA is itself in float64 on a CPU: outputs and all gradients, with padding."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from stability.mechanisms import build
from stability.models.passes import allow_tf32
from stability.registry import Registry
from tests.cuda import DEVICE, here
from tests.mechanisms.checks import build_seeded
from tests.within import assert_within, relative_error, rounding_floor

NAMES = here(Registry("mechanisms").names(cross=False, trainable=True), ("sa", "gla"))
# sums of 24 positions and 16 features through exponentials and norms: some hundreds of roundings of 6e-8
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_a_mechanism_on_this_device_is_itself_in_float64_on_a_cpu(name):
    allow_tf32("float32", torch.device(DEVICE))  # convolutions use it unless told, as a run tells them
    mechanism = Registry("mechanisms").load(name)
    for direction in sorted(mechanism.supported_directions(mechanism.Config())):
        shape = {"width": 16, "heads": 2, "direction": direction, "layer": 1, "num_layers": 2}
        layer = build_seeded(partial(build, name, **shape))
        generator = torch.Generator().manual_seed(0)
        x_BND, mask_BN = torch.randn(2, 24, 16, generator=generator), torch.ones(2, 24, dtype=torch.bool)
        mask_BN[0, -5:] = False
        found = []
        for device, dtype in ((DEVICE, torch.float32), ("cpu", torch.float64)):
            module, given = layer.to(device, dtype), x_BND.to(device, dtype, copy=True).requires_grad_()
            mask = mask_BN.to(device)
            y = module(given, mask_BN=mask)
            y = (y[0] if isinstance(y, tuple) else y)[mask]
            leaves = [given, *module.parameters()]
            gradients = torch.autograd.grad(y.square().sum(), leaves, materialize_grads=True)
            found.append([each.detach().cpu() for each in (y, *gradients)])
        floor = rounding_floor(TOLERANCE, torch.float32, *found[1])
        for mine, truth in zip(*found, strict=True):
            assert_within(relative_error(mine, truth, floor), TOLERANCE, name, direction)
