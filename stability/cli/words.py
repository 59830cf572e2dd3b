"""Take the words of a command line apart once: every later stage of reading it works on what this gives."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from stability.cli.places import quoted
from stability.config.base import AXES
from stability.config.model import ModelSpec

OF_EVERY_MODEL = tuple(f"model.{key}" for key, field in ModelSpec.model_fields.items() if not field.is_required())
CHOICES = (*AXES, "model", "ffn", "position", "linear", "objective", "data", "schedule", "lr", "search")
ADDED = ("ablate.", "search.space.", "optimizer.groups.")  # how keys begin that no yaml lists
SHORT = {"init": "init.source"}  # a group whose one word is its main setting
A_RATE = re.compile(r"^([\[\d.+-]|nan$|inf$)")  # how a number or a list of them begins


@dataclass(frozen=True)
class Word:
    """One word of the command line: of ``++mechanism.sc.window=4`` the sign ``++``, the key ``mechanism.sc.window`` and
    the value ``4``.

    ``str`` gives back what was typed. ``value`` is None where the word has no ``=``, as ``~lr``.
    """

    sign: str
    key: str
    value: str | None

    @classmethod
    def of(cls, text: str) -> Word:
        """Return the parts of a word as it was typed. One of the wrong form has parts, too: `check_words` refuses
        it."""
        signed, equals, value = text.partition("=")
        key = signed.lstrip("+~")
        return cls(signed.removesuffix(key), key, value if equals else None)

    def __str__(self) -> str:
        return f"{self.sign}{self.key}" + ("" if self.value is None else f"={self.value}")

    @property
    def group(self) -> str:
        """The key's beginning: ``mechanism`` of ``mechanism.sc.window``."""
        return self.key.partition(".")[0]

    def for_hydra(self) -> tuple[Word, ...]:
        """Return the words that Hydra gets for this word.

        ``lr=1e-3`` and ``lr=[…]`` choose conf/lr/values.yaml, ``init=…`` sets ``init.source``, paths are quoted,
        ``ablate.…``, ``search.space.…``, ``optimizer.groups.…`` and what a model's yaml may leave to its default are
        added; everything else passes unchanged.
        """
        if self.value is None:
            return (self,)
        if not self.sign:
            if self.key == "lr" and A_RATE.match(self.value):
                rates = self.value if self.value.startswith("[") else f"[{self.value}]"
                return Word("", "lr", "values"), Word("", "lr.values", rates)
            if self.key in SHORT:
                return Word("", SHORT[self.key], self.value).for_hydra()
            # the parts' own, which no root yaml can list; or in few of conf/model
            if self.key.startswith(ADDED) or self.key in OF_EVERY_MODEL:
                return (Word("++", self.key, self.value),)
        whole = quoted(self.key, self.value)
        return (self if whole is None else Word(self.sign, self.key, whole),)


@dataclass(frozen=True)
class Invocation:
    """The words of a command line in the order in which they were typed."""

    words: tuple[Word, ...]

    @classmethod
    def of(cls, argv: Iterable[str], *, first: str | None = None) -> Invocation:
        """Return the words of ``argv``. ``first``: the key of which a first word without ``=`` is the value, as in
        ``status quickstart``."""
        words = [Word.of(text) for text in argv]
        if first is not None and words and words[0].value is None:
            words[0] = Word("", first, str(words[0]))
        return cls(tuple(words))

    @property
    def overrides(self) -> list[Word]:
        """The words that Hydra gets."""
        return [override for word in self.words for override in word.for_hydra()]

    @property
    def given(self) -> dict[str, str]:
        """The values that the command line sets, by key, as Hydra gets them; none of words that have a sign."""
        return {word.key: word.value for word in self.overrides if not word.sign and word.value is not None}
