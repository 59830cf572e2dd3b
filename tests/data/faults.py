"""Data sources with one planted fault each, all of the same forty short texts."""

from __future__ import annotations

import random
import socket
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from stability.config import Settings
from stability.corpora.tokens.corpus import Corpus
from stability.corpora.tokens.split import split_documents
from stability.data import AbstractDataSource
from tests.data.sources import sentence


class Sound(AbstractDataSource):
    """The one without a fault."""

    class Config(Settings):
        first: int = 0

    @classmethod
    def texts(cls, config: Any) -> list[str]:
        return [sentence(config.first + row) for row in range(40)]

    @classmethod
    def prepare(cls, config: Any, scratch: Path | None = None) -> Corpus:
        return split_documents(cls.texts(config), "texts")

    @classmethod
    def cache_key(cls, config: Any) -> str:
        return str(config.first)


class AsksTheNetwork(Sound):
    @classmethod
    def texts(cls, config: Any) -> list[str]:
        with socket.socket() as connection:
            connection.connect(("127.0.0.1", 9))
        return super().texts(config)


class ChoosesAtRandom(Sound):
    @classmethod
    def texts(cls, config: Any) -> list[str]:
        return [sentence(random.randrange(10**6)) for _ in range(40)]


class ForgetsWhatItKeyed(Sound):
    @classmethod
    def cache_key(cls, config: Any) -> str:
        return str(random.random())


class HoldsOutWhatItTrainsOn(Sound):
    @classmethod
    def prepare(cls, config: Any, scratch: Path | None = None) -> Corpus:
        made = super().prepare(config)
        both = np.concatenate([made.train_tokens, [0], made.val_tokens]).astype(np.uint16)
        return Corpus.of(
            both, made.val_tokens, vocab_size=256, description="x", num_train_documents=40, num_val_documents=1
        )


class Altered(Corpus):
    """A corpus whose batches are not what they are to be."""

    def batch(self, split: str, num: int, positions: int, generator: torch.Generator) -> Tensor:
        return self.altered(super().batch(split, num, positions, generator))

    def altered(self, tokens_BN: Tensor) -> Tensor:
        raise NotImplementedError


class Narrow(Altered):
    def altered(self, tokens_BN: Tensor) -> Tensor:
        return tokens_BN.int()


class Beyond(Altered):
    def altered(self, tokens_BN: Tensor) -> Tensor:
        return tokens_BN + 256


class Redrawn(Altered):
    def altered(self, tokens_BN: Tensor) -> Tensor:
        return (tokens_BN + torch.randint(256, (), dtype=torch.int64)) % 256


class Constant(Altered):
    def altered(self, tokens_BN: Tensor) -> Tensor:
        return torch.zeros_like(tokens_BN)


class OfCorpus(Sound):
    made: ClassVar[type[Altered]]

    @classmethod
    def prepare(cls, config: Any, scratch: Path | None = None) -> Corpus:
        corpus = super().prepare(config)
        return cls.made(**{field.name: getattr(corpus, field.name) for field in fields(corpus)})


class GivesNarrowTokens(OfCorpus):
    made = Narrow


class GivesTokensBeyond(OfCorpus):
    made = Beyond


class RedrawsItsBatch(OfCorpus):
    made = Redrawn


class GivesOneBatch(OfCorpus):
    made = Constant


class IgnoresItsSetting(Sound):
    @classmethod
    def texts(cls, config: Any) -> list[str]:
        return [sentence(row) for row in range(40)]


class ForgetsItsSettingInItsKey(Sound):
    @classmethod
    def cache_key(cls, config: Any) -> str:
        return "texts"
