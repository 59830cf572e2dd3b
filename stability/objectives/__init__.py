"""Training objectives, one file each."""

from stability.objectives._base import AbstractObjective, Examples, ObjectiveSettings, weighted_cross_entropy
from stability.objectives._mask_rates import mask_rates, random_mask

__all__ = [
    "AbstractObjective",
    "Examples",
    "ObjectiveSettings",
    "mask_rates",
    "random_mask",
    "weighted_cross_entropy",
]
