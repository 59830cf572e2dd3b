"""What the plan charges for α_max and for what `measure` adds to it."""

from __future__ import annotations

import pytest

from stability.config import CurvatureSpec
from sweeps.plan import PRODUCT, RECORDED_STEP, curvature_steps

ALONE = CurvatureSpec(state=("checkpoint",), warmup_steps=0, recorded_steps=2, parity_steps=0)


def cost(**changes):
    return curvature_steps(ALONE.model_copy(update=changes), 4)


@pytest.mark.parametrize("name", ["critical_lr", "profile", "sharpness", "density", "blocks"])
def test_everything_that_can_be_measured_costs_something_more(name):
    assert cost(measure=("alpha_max", name)) > cost() + 1


def test_a_table_alone_is_charged_one_recorded_step_and_its_products():
    spectra = ALONE.spectra.model_copy(update={"density_probes": 2, "density_products": 5})
    assert cost(measure=("density",), spectra=spectra) == pytest.approx(RECORDED_STEP + 10 * PRODUCT)
    both = cost(measure=("density",), spectra=spectra, state=("paper", "checkpoint"), warmup_batches=7, warmup_steps=3)
    assert both == pytest.approx(2 * (RECORDED_STEP + 10 * PRODUCT) + 7 + 2 * 3)


def test_differences_are_charged_for_no_more_steps_than_are_recorded():
    assert cost(parity_steps=9) == cost(parity_steps=2) > cost(parity_steps=1) > cost()


def test_deeper_models_have_more_blocks_and_two_phases_cost_twice():
    assert curvature_steps(ALONE.model_copy(update={"measure": ("blocks",)}), 8) > cost(measure=("blocks",))
    assert cost(phase="all") == 2 * cost()
