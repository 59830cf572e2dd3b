"""Text to token numbers and back, and the settings by which a data source of text lets the user choose how."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsInt

import numpy as np

from stability.corpora.tokens.vocabulary import BYTES, Vocabulary


class AbstractTokenizer:
    """A rule by which text becomes tokens. ``vocabulary``: its tokens, with the separator; ``label``: how descriptions
    name it, None: nothing to say (bytes)."""

    vocabulary: Vocabulary
    label: str | None

    def encode(self, text: str) -> np.ndarray:
        """Return the text's tokens, a 1-D array of unsigned integers."""
        raise NotImplementedError


class ByteTokenizer(AbstractTokenizer):
    """UTF-8 bytes as tokens: 256 of them, nothing to learn. Byte 0 stands between documents and therefore in none of
    them."""

    vocabulary = BYTES
    label = None
    vocab_size = 256
    separator = 0

    def encode(self, text: str) -> np.ndarray:
        """Return the UTF-8 bytes of ``text``, a 1-D uint16 array. Errors: ``UnicodeEncodeError`` for a lone surrogate,
        which has no UTF-8 form."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """Return the text of tokens, the inverse of `encode`; bytes that are no UTF-8 (a model may emit any) become
        U+FFFD. Errors: ``ValueError`` for a token above 255."""
        return BYTES.decode(tokens)
