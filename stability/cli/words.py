"""Parse the words of a command line once, for all later stages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from stability.cli.places import quote_value
from stability.config.base import AXES
from stability.config.model import ModelSpec

OF_EVERY_MODEL = tuple(f"model.{key}" for key, field in ModelSpec.model_fields.items() if not field.is_required())
CHOICES = (*AXES, "model", "ffn", "position", "linear", "objective", "data", "schedule", "lr", "search")
# prefixes of keys missing from all yamls
ADDED = ("ablate.", "vary.", "search.space.", "optimizer.groups.", "halving.")
SHORT = {"init": "init.source"}  # abbreviations: a group's name for its main setting
A_RATE = re.compile(r"^([\[\d.+-]|nan$|inf$)")  # the beginning of a number or a list of numbers


@dataclass(frozen=True)
class Word:
    """One word of the command line; ``str`` returns it as typed.

    Attributes:
        sign: e.g. ``++`` in ``++mechanism.sc.window=4``.
        key: e.g. ``mechanism.sc.window``.
        value: e.g. ``4``; None without ``=``, e.g. ``~lr``.
    """

    sign: str
    key: str
    value: str | None

    @classmethod
    def of(cls, text: str) -> Word:
        """Parse a word. Malformed ones are accepted here and refused by `check_words`."""
        signed, equals, value = text.partition("=")
        key = signed.lstrip("+~")
        return cls(signed.removesuffix(key), key, value if equals else None)

    def __str__(self) -> str:
        return f"{self.sign}{self.key}" + ("" if self.value is None else f"={self.value}")

    @property
    def group(self) -> str:
        """First part of the key: ``mechanism`` of ``mechanism.sc.window``."""
        return self.key.partition(".")[0]

    def to_hydra(self) -> tuple[Word, ...]:
        """Return the words given to Hydra for this word.

        - ``lr=1e-3`` and ``lr=[…]`` choose conf/lr/values.yaml.
        - ``init=…`` sets ``init.source``.
        - Paths are quoted.
        - ``ablate.…``, ``vary.…``, ``search.space.…``, ``optimizer.groups.…`` and a model's optional settings get the
          sign ``++``.
        - All others are unchanged.
        """
        if self.value is None:
            return (self,)
        if not self.sign:
            if self.key == "lr" and A_RATE.match(self.value):
                rates = self.value if self.value.startswith("[") else f"[{self.value}]"
                return Word("", "lr", "values"), Word("", "lr.values", rates)
            if self.key in SHORT:
                return Word("", SHORT[self.key], self.value).to_hydra()
            # settings of parts, missing from every root yaml; or optional ones, in few yamls of conf/model
            if self.key.startswith(ADDED) or self.key in OF_EVERY_MODEL:
                return (Word("++", self.key, self.value),)
        whole = quote_value(self.key, self.value)
        return (self if whole is None else Word(self.sign, self.key, whole),)


@dataclass(frozen=True)
class Invocation:
    """The words of a command line, in their order."""

    words: tuple[Word, ...]

    @classmethod
    def of(cls, argv: Iterable[str], *, first: str | None = None) -> Invocation:
        """Parse the words of ``argv``.

        ``first`` is the key for a first word without ``=``, as in ``status quickstart``.
        """
        words = [Word.of(text) for text in argv]
        if first is not None and words and words[0].value is None:
            words[0] = Word("", first, str(words[0]))
        return cls(tuple(words))

    @property
    def overrides(self) -> list[Word]:
        """The words given to Hydra."""
        return [override for word in self.words for override in word.to_hydra()]

    @property
    def given(self) -> dict[str, str]:
        """The values for Hydra by key, without words that have a sign."""
        return {word.key: word.value for word in self.overrides if not word.sign and word.value is not None}
