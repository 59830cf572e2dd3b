"""Tokenizers: text to token numbers and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsInt

import numpy as np

from stability.corpora.tokens.vocabulary import BYTES, Vocabulary


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
