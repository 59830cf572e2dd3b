"""Data sources, one file each: what they read becomes a corpus of one kind (see `stability.corpora`)."""

from stability.data._base import AbstractDataSource

__all__ = ["AbstractDataSource"]
