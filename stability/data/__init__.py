"""Data sources, one file each; each yields a corpus of one kind (see `stability.corpora`)."""

from stability.data._base import AbstractDataSource

__all__ = ["AbstractDataSource"]
