"""Training objectives, one file each."""

from stability.objectives._base import AbstractObjective, Examples, ObjectiveSettings, weighted_cross_entropy

__all__ = ["AbstractObjective", "Examples", "ObjectiveSettings", "weighted_cross_entropy"]
