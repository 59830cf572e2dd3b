"""Kinds of linear maps, one file each."""

from stability.linears._base import AbstractLinear, replace_linears

__all__ = ["AbstractLinear", "replace_linears"]
