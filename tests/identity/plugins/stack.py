"""A pattern of somebody's own: its `parts` are mechanisms of ours, and no marker says so."""

from __future__ import annotations

from typing import Any

from stability.config import Settings
from stability.config.parts import Part, part
from stability.mechanisms.mix import Mix


class Stack(Mix):
    class Config(Settings):
        pattern: tuple[str, ...] = ("sa", "sc")
        parts: tuple[Part, ...] = (part("mechanisms", "sa"), part("mechanisms", "sc"))

    build: Any


EXPORT = Stack
