"""A vocabulary says what each token of a corpus stands for: kept beside the tokens, so that they can be read without
the tokenizer that made them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import SupportsInt

REPLACEMENT = "\ufffd".encode()


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a tokenizer has. ``name`` of the tokenizer; ``pieces``: the bytes that each token stands for;
    ``separator``: the token between documents, None: there is none.

    ``complement``: of each nucleotide the one that pairs with it (by token); empty where the tokens are no nucleotides.
    """

    name: str
    pieces: tuple[bytes, ...]
    separator: int | None = None
    complement: tuple[int, ...] = ()

    @property
    def unknown(self) -> int | None:
        """The token that stands for all that the vocabulary leaves out (`data.keep`), the last one; None: nothing is
        left out."""
        return len(self.pieces) - 1 if self.pieces[-1] == REPLACEMENT else None

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """Return the text of the tokens; bytes that are no UTF-8 become U+FFFD. Errors: ``ValueError`` for a token
        outside of the vocabulary (a mask, say)."""
        numbers = [int(token) for token in tokens]
        outside = next((number for number in numbers if not 0 <= number < len(self.pieces)), None)
        if outside is not None:
            raise ValueError(
                f"token {outside} stands for no text; the vocabulary '{self.name}' has {len(self.pieces):,}"
            )
        return b"".join(self.pieces[number] for number in numbers).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """Return one line that `from_json` reads."""
        pieces = [piece.decode("latin-1") for piece in self.pieces]  # any byte is one character there
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
