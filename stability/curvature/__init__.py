"""Compute slope, curvature and α_max of any loss along any direction: a library of its own, which imports torch and
nothing of this project."""

from stability.curvature._graph import NoSecondDerivative
from stability.curvature._jet import NoRule
from stability.curvature.alpha_max import (
    NO_CHANGE,
    NO_STEP,
    NOT_DEFINED,
    alpha_max,
    paper_state,
    step_direction,
    step_without_decay,
)
from stability.curvature.diagonal import hutchinson_diagonal
from stability.curvature.monitor import AlphaMaxMonitor, MonitorRow
from stability.curvature.parallel import parallel_directional
from stability.curvature.products import METHODS, Directional, directional, hvp
from stability.curvature.training_graph import GradientWithGraph

__all__ = [
    "METHODS",
    "NOT_DEFINED",
    "NO_CHANGE",
    "NO_STEP",
    "AlphaMaxMonitor",
    "Directional",
    "GradientWithGraph",
    "NoRule",
    "MonitorRow",
    "NoSecondDerivative",
    "parallel_directional",
    "alpha_max",
    "directional",
    "hutchinson_diagonal",
    "hvp",
    "paper_state",
    "step_direction",
    "step_without_decay",
]
