"""Attention that is not to be trained, as one that skips what hardly counts in a model that is."""

from __future__ import annotations

from stability.mechanisms.sa import SoftmaxAttention


class Skipping(SoftmaxAttention):
    """Softmax attention in all but what may be done with it."""

    trainable = False
    used_for = "generation from models trained with sa"


EXPORT = Skipping
