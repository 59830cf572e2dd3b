"""A mechanism of somebody's own that starts from a file."""

from __future__ import annotations

from typing import Annotated

from stability.config import Place, Settings
from stability.mechanisms.sa import SoftmaxAttention


class WithWeights(SoftmaxAttention):
    class Config(Settings):
        start: Annotated[str | None, Place()] = None


EXPORT = WithWeights
