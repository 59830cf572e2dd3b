"""An optimizer of somebody's own that takes over all settings of ours: its ids hold them, since it is younger than they
are."""

from __future__ import annotations

from stability.optimizers.adamw import AdamW


class LazyAdam(AdamW):
    class Config(AdamW.Config):
        patience: int = 3


EXPORT = LazyAdam
