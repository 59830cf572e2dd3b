"""A data source of somebody's own, written before settings could be marked: none of its fields says what it is."""

from __future__ import annotations

from typing import Any, ClassVar

from stability.config import Settings
from stability.data import AbstractDataSource


class Elsewhere(AbstractDataSource):
    class Config(Settings):
        path: str = "somewhere"
        annotations: str | None = None
        keep: int | None = None
        part: str = "all"

    family: ClassVar[str] = "data"
    prepare: Any


EXPORT = Elsewhere
