"""Position schemes, one file each."""

from stability.positions._base import AbstractPosition

__all__ = ["AbstractPosition"]
