"""A data source of somebody's own with paths of every kind: marked, listed, and left unmarked."""

from __future__ import annotations

from typing import Annotated, Any

from stability.config import Place, Settings
from stability.data import AbstractDataSource


class OwnFiles(AbstractDataSource):
    class Config(Settings):
        folder: Annotated[str | None, Place()] = None
        tables: Annotated[tuple[str, ...], Place()] = ()
        unmarked: str = ""
        number: int = 3

    prepare: Any


EXPORT = OwnFiles
