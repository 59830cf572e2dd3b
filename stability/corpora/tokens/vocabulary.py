"""Vocabularies: the bytes of each token, stored beside a corpus.

Tokens can thus be read without their tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import SupportsInt

import numpy as np

REPLACEMENT = "\ufffd".encode()


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer.

    Attributes:
        name: the tokenizer's name.
        pieces: bytes of each token.
        separator: token between documents; None: there is none.
        complement: pairing token of each nucleotide; empty for other tokens.
    """

    name: str
    pieces: tuple[bytes, ...]
    separator: int | None = None
    complement: tuple[int, ...] = ()

    @property
    def unknown(self) -> int | None:
        """The last token if it replaces those left out by `data.keep`; None: nothing is left out."""
        return len(self.pieces) - 1 if self.pieces[-1] == REPLACEMENT else None

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """Return the tokens' text; invalid UTF-8 becomes U+FFFD.

        Raises:
            ValueError: a token is outside the vocabulary, e.g. a mask.
        """
        numbers = [int(token) for token in tokens]
        outside = next((number for number in numbers if not 0 <= number < len(self.pieces)), None)
        if outside is not None:
            raise ValueError(
                f"token {outside} stands for no text; the vocabulary '{self.name}' has {len(self.pieces):,}"
            )
        return b"".join(self.pieces[number] for number in numbers).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """Return one line for `from_json`."""
        pieces = [piece.decode("latin-1") for piece in self.pieces]  # latin-1 maps each byte to one character
        return json.dumps(
            {"name": self.name, "pieces": pieces, "separator": self.separator, "complement": self.complement}
        )

    @classmethod
    def from_json(cls, text: str) -> Vocabulary:
        values = json.loads(text)
        pieces = tuple(piece.encode("latin-1") for piece in values["pieces"])
        return cls(values["name"], pieces, values["separator"], tuple(values["complement"]))

    def sha256(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()


BYTES = Vocabulary("bytes", tuple(bytes([value]) for value in range(256)), separator=0)


class AbstractTokenizer:
    """Base of tokenizers.

    Attributes:
        vocabulary: its tokens, including the separator.
        label: its name in descriptions; None: not mentioned (bytes).
    """

    vocabulary: Vocabulary
    label: str | None

    def encode(self, text: str) -> np.ndarray:
        """Return the text's tokens, a 1-D array of unsigned integers."""
        raise NotImplementedError


class ByteTokenizer(AbstractTokenizer):
    """UTF-8 bytes as 256 tokens.

    Byte 0 separates documents, so no document may contain byte 0.
    """

    vocabulary = BYTES
    label = None
    vocab_size = 256
    separator = 0

    def encode(self, text: str) -> np.ndarray:
        """Return the UTF-8 bytes of ``text``, a 1-D uint16 array.

        Raises:
            UnicodeEncodeError: the text has a lone surrogate, without UTF-8 form.
        """
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """Return the tokens' text, the inverse of `encode`.

        Invalid UTF-8, possible in a model's output, becomes U+FFFD.

        Raises:
            ValueError: a token is above 255.
        """
        return BYTES.decode(tokens)
