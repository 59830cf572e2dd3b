"""Slope, curvature and α_max of any loss along any direction.

A library of its own: it imports torch and nothing of this project.
"""

from stability.curvature._directional import Directional
from stability.curvature._graph import NoSecondDerivative
from stability.curvature._jet import NoRule
from stability.curvature.adam import (
    PreconditionedSharpness,
    adam_preconditioner,
    adam_threshold,
    preconditioned_sharpness,
)
from stability.curvature.alpha_max import (
    NO_CHANGE,
    NO_STEP,
    NOT_DEFINED,
    alpha_max,
    paper_state,
    step_direction,
    step_without_decay,
)
from stability.curvature.critical import CriticalLR, critical_lr, loss_along
from stability.curvature.decompose import (
    GaussNewton,
    NoiseScale,
    block_shares,
    gauss_newton,
    gauss_newton_product,
    gradient_noise_scale,
)
from stability.curvature.monitor import AlphaMaxMonitor, MonitorRow
from stability.curvature.parallel import parallel_directional
from stability.curvature.products import METHODS, directional, hvp
from stability.curvature.recorded import RecordedLoss
from stability.curvature.spectrum import (
    Eigenvalue,
    SpectralDensity,
    eigenvalues,
    spectral_density,
    top_eigenvalue,
)
from stability.curvature.taylor import missing_rule
from stability.curvature.traces import Diagonal, Trace, hessian_diagonal, hutchinson_diagonal, hutchinson_trace, trace
from stability.curvature.training_graph import GradientWithGraph

__all__ = [
    "METHODS",
    "NOT_DEFINED",
    "NO_CHANGE",
    "NO_STEP",
    "AlphaMaxMonitor",
    "CriticalLR",
    "Diagonal",
    "Directional",
    "Eigenvalue",
    "GaussNewton",
    "GradientWithGraph",
    "MonitorRow",
    "NoRule",
    "NoSecondDerivative",
    "NoiseScale",
    "PreconditionedSharpness",
    "RecordedLoss",
    "SpectralDensity",
    "Trace",
    "adam_preconditioner",
    "adam_threshold",
    "alpha_max",
    "block_shares",
    "critical_lr",
    "directional",
    "eigenvalues",
    "gauss_newton",
    "gauss_newton_product",
    "gradient_noise_scale",
    "hessian_diagonal",
    "hutchinson_diagonal",
    "hutchinson_trace",
    "hvp",
    "loss_along",
    "missing_rule",
    "paper_state",
    "parallel_directional",
    "preconditioned_sharpness",
    "spectral_density",
    "step_direction",
    "step_without_decay",
    "top_eigenvalue",
    "trace",
]
