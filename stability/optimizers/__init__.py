"""Optimizers, one file each."""

from stability.optimizers._base import AbstractOptimizer
from stability.optimizers._groups import parameter_groups

__all__ = ["AbstractOptimizer", "parameter_groups"]
