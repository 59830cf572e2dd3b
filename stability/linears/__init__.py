"""Kinds of linear maps, one file each."""

from stability.linears._base import AbstractLinear, drop_biases, replace_linears

__all__ = ["AbstractLinear", "drop_biases", "replace_linears"]
