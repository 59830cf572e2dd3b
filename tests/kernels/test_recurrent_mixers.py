"""``impl=triton`` of the mixers that the scan serves is their reference: outputs, gradients by everything, derivatives
along a line."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels import recurrent
from stability.config.impl import Use
from stability.config.parts import part
from stability.curvature import directional
from stability.mechanisms import build
from stability.registry import Registry
from stability.runs.directory import read_jsonl
from stability.training.checkpoint import load
from tests.kernels.interpreted import interpreter_is_prepared_once
from tests.mechanisms.checks import build_seeded
from tests.within import assert_within, relative_error, rounding_floor

__all__ = ["interpreter_is_prepared_once"]
MIXERS = {
    "retnet": {"chunk": 4},
    "gla": {"chunk": 4, "expand_k": 1.0, "expand_v": 2.0},
    "hgrn2": {"chunk": 4},
    "deltanet": {"chunk": 4},
    "gated_deltanet": {"chunk": 4, "negative_eigenvalues": True},
    "kda": {"chunk": 4},
}
SHAPE = {"width": 8, "heads": 2, "direction": "causal", "layer": 1, "num_layers": 2}


def both(name, **settings):
    """Return the mixer by its reference and by kernels, with the same parameters."""
    layers = [build_seeded(partial(build, name, **SHAPE, impl=impl, **settings)) for impl in ("reference", "triton")]
    assert layers[0].state_dict().keys() == layers[1].state_dict().keys()
    return layers


@pytest.mark.parametrize(("name", "settings"), MIXERS.items())
def test_a_mixer_on_kernels_is_its_reference_under_padding(monkeypatch, name, settings):
    calls, scan = [], recurrent.SCAN
    monkeypatch.setattr(recurrent, "SCAN", lambda *given, **more: calls.append(name) or scan(*given, **more))
    generator = torch.Generator().manual_seed(1)
    x_BND, mask_BN = torch.randn(1, 18, 8, generator=generator), torch.ones(1, 18, dtype=torch.bool)
    mask_BN[0, [0, 5, 17]] = False
    found = []
    for layer in both(name, **settings):
        given = x_BND.clone().requires_grad_()
        y_BND = layer(given, mask_BN=mask_BN)[mask_BN]
        found.append((y_BND, *torch.autograd.grad(y_BND.square().sum(), [given, *layer.parameters()])))
    assert calls == [name], "the reference calls none"
    floor = rounding_floor(1e-5, torch.float32, *found[0])
    for theirs, ours in zip(*found, strict=True):
        assert_within(relative_error(ours, theirs, floor), 1e-5)


@pytest.mark.parametrize("name", ["gla", "gated_deltanet"])
def test_derivatives_along_a_line_pass_through_the_kernels(name):
    x_BND = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(2))
    measured = []
    for layer in both(name, **MIXERS[name]):
        params = {key: each.detach() for key, each in layer.named_parameters()}
        generator = torch.Generator().manual_seed(3)
        direction = {key: torch.randn(each.shape, generator=generator) for key, each in params.items()}

        def loss(params, layer=layer):
            return torch.func.functional_call(layer, params, (x_BND,)).square().sum()

        measured.append(directional(loss, params, direction, method="taylor"))
    theirs, ours = measured
    assert (ours.slope, ours.curvature) == pytest.approx((theirs.slope, theirs.curvature), rel=1e-5)


def test_every_mixer_says_that_its_kernels_have_a_second_order_and_how_wide_keys_may_be():
    for name in MIXERS:
        chosen = part("mechanisms", {"name": name, "impl": "triton"})
        (kernels,) = Registry("mechanisms").load(name).kernels(chosen.settings)
        assert kernels.setting == f"{name}.impl=triton" and kernels.second_order
        kernels.check(Use(width=512, heads=2, direction="causal"))
        (of_library,) = (
            Registry("mechanisms").load(name).kernels(part("mechanisms", {"name": name, "impl": "fla"}).settings)
        )
        assert not of_library.second_order
    for name, width in (("gla", 2048), ("deltanet", 1024)):
        chosen = part("mechanisms", {"name": name, "impl": "triton"})
        (kernels,) = Registry("mechanisms").load(name).kernels(chosen.settings)
        with pytest.raises(ValueError, match=rf"^{name}\.impl=triton has no kernel for keys of width 512; impl=ref"):
            kernels.check(Use(width=width, heads=2, direction="causal"))


@pytest.mark.slow
def test_a_run_of_three_steps_on_kernels_is_that_of_the_reference(lab):
    """The loss of every step and the weights after the last, of a model of two layers."""
    found = []
    for impl in ("reference", "triton"):
        mechanism = {"name": "gated_deltanet", "impl": impl}
        changes = {
            "steps": 3,
            "batch": 1,
            "evaluation": {"every_steps": 3, "sequences": 2},
            "objective": {"name": "ar"},
        }
        directory = lab.train(lab.spec(**changes, mechanism=mechanism))
        rows = [row for row in read_jsonl(directory.metrics_file) if row["step"]]
        found.append(([row["loss"] for row in rows], load(directory.checkpoints()[-1])[1].state_dict()))
    (losses, weights), (losses_by_kernels, weights_by_kernels) = found
    assert len(losses) == 3 and losses_by_kernels == pytest.approx(losses, rel=1e-5)
    floor = rounding_floor(1e-5, torch.float32, *weights.values())
    for name, expected in weights.items():
        assert_within(relative_error(weights_by_kernels[name], expected, floor), 1e-5, name)
