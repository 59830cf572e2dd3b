"""Parametrizations, one file each: the factors by which initial values, learning rates, decay and ε grow with size."""

from stability.parametrizations._base import AbstractParametrization, Growth

__all__ = ["AbstractParametrization", "Growth"]
