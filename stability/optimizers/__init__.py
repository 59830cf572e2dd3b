"""Optimizers, one file each."""

from stability.optimizers._base import AbstractOptimizer
from stability.optimizers._groups import check_roles, optimizer_of, parameter_groups, roles, set_lr

__all__ = ["AbstractOptimizer", "check_roles", "optimizer_of", "parameter_groups", "roles", "set_lr"]
