"""Text, nucleotides, residues and classes of a deployed model, stored without the run's data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, SupportsInt, cast

import numpy as np

from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from stability.corpora.proteins import alphabets
from stability.corpora.tokens import augmentation as nucleotides
from stability.corpora.tokens.settings import AbstractTokenized
from stability.corpora.tokens.vocabulary import BYTES, Vocabulary

TEXT, NUCLEOTIDES, RESIDUES, CLASSES, NUMBERS = "text", "nucleotides", "residues", "classes", "numbers"


@dataclass(frozen=True)
class Tokens:
    """What a model's inputs and outputs stand for.

    Attributes:
        kind: "text", "nucleotides", "residues", "classes" (of images), or "numbers" without a meaning.
        vocabulary: bytes of each token (text, nucleotides).
        pairs: GPT-2's byte pairs as plain JSON (`stability.corpora.tokens.gpt2`); None: text is bytes.
        classes: name of each class.
    """

    kind: str
    vocabulary: Vocabulary | None = None
    pairs: dict[str, Any] | None = None
    classes: tuple[str, ...] = ()

    def encode(self, text: str) -> np.ndarray:
        """Return a text's tokens, int64.

        Raises:
            ValueError: a character is outside the vocabulary, or the model reads no text.
        """
        if self.kind == RESIDUES:
            return _check_letters(text, alphabets.encode(text), alphabets.UNK, "amino acid")
        if self.kind == NUCLEOTIDES:
            found = np.frombuffer(nucleotides.encode(text.encode("latin-1", "replace")), dtype=np.uint8)
            return _check_letters(text, found, nucleotides.INVALID, "nucleotide")
        if self.kind != TEXT:
            raise ValueError(f"the model reads {self.kind}, no text")
        if self.pairs is None:
            try:
                return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)
            except UnicodeEncodeError as error:
                raise ValueError(f"character {error.start + 1} of the text has no UTF-8 form") from None
        return self._encode_pairs(text)

    def _encode_pairs(self, text: str) -> np.ndarray:
        from stability.corpora.tokens.gpt2 import Gpt2Tokenizer

        assert self.vocabulary is not None and self.pairs is not None
        tokenizer = Gpt2Tokenizer.of_json(self.pairs)
        tokens = tokenizer.encode(text).astype(np.int64)
        if (unknown := self.vocabulary.unknown) is None:
            return tokens
        number = {piece: index for index, piece in enumerate(self.vocabulary.pieces)}
        table = np.array([number.get(piece, unknown) for piece in tokenizer.vocabulary.pieces])
        return table[tokens]

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """Return the tokens' text; invalid UTF-8 becomes U+FFFD."""
        if self.kind == RESIDUES:
            return alphabets.decode(np.array([int(token) for token in tokens]))
        assert self.vocabulary is not None
        return self.vocabulary.decode(tokens)

    @property
    def separator(self) -> int | None:
        """Token between documents, or None."""
        return None if self.vocabulary is None else self.vocabulary.separator

    def to_json(self) -> str:
        vocabulary = None if self.vocabulary is None else json.loads(self.vocabulary.to_json())
        values = {"kind": self.kind, "vocabulary": vocabulary, "pairs": self.pairs, "classes": self.classes}
        return json.dumps(values, sort_keys=True)

    @classmethod
    def of_json(cls, text: str) -> Tokens:
        """Return the tokens of `to_json`.

        Raises:
            ValueError: the text is no such JSON.
        """
        try:
            values = json.loads(text)
            vocabulary = values["vocabulary"]
            known = None if vocabulary is None else Vocabulary.from_json(json.dumps(vocabulary))
            return cls(values["kind"], known, values["pairs"], tuple(values["classes"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"field {error} is missing or damaged") from None

    @classmethod
    def of_run(cls, spec: RunSpec, corpus: AbstractCorpus) -> Tokens:
        """Return the tokens of a run's data.

        Raises:
            ValueError, RuntimeError: the rank files of its byte-pair encoding cannot be read.
        """
        if corpus.kind == "images":
            return cls(CLASSES, classes=tuple(cast(Any, corpus).class_names))
        if corpus.kind == "proteins":
            return cls(RESIDUES)
        if corpus.kind != "tokens":
            return cls(NUMBERS)
        found = cast(Any, corpus)
        vocabulary = found.vocabulary or (BYTES if found.vocab_size == len(BYTES.pieces) else None)
        if vocabulary is None:
            return cls(NUMBERS)
        if vocabulary.complement:
            return cls(NUCLEOTIDES, vocabulary)
        settings = spec.data.settings
        if vocabulary == BYTES or not isinstance(settings, AbstractTokenized):
            return cls(TEXT, vocabulary) if vocabulary == BYTES else cls(NUMBERS, vocabulary)
        return cls(TEXT, vocabulary, cast(Any, settings.build_tokenizer()).to_json())


def _check_letters(text: str, tokens: np.ndarray, invalid: int, noun: str) -> np.ndarray:
    """Return the tokens as int64; ``ValueError`` at the first invalid letter."""
    if len(places := np.flatnonzero(tokens == invalid)):
        at = int(places[0])
        raise ValueError(f"character {at + 1} is {text[at]!r}, which is no {noun}")
    return tokens.astype(np.int64)
