"""Nucleotides as tokens: every code of the IUPAC (Cornish-Bowden, Nucleic Acids Res. 13:3021, 1985) is one, and so is the gap."""

from __future__ import annotations

import numpy as np

from stability.data._vocabulary import Vocabulary

CODES = "ACGTURYSWKMBDHVN-"
# what pairs with each: R = A|G with Y = C|T, and so on; U pairs with A, A with T
PAIRS = "TGCAAYRSWMKVHDBN-"
INVALID = 255

VOCABULARY = Vocabulary("nucleotides", tuple(code.encode() for code in CODES), complement=tuple(CODES.index(pair) for pair in PAIRS))


def _table() -> bytes:
    table = bytearray([INVALID] * 256)
    for token, code in enumerate(CODES):
        table[ord(code)] = table[ord(code.lower())] = token
    table[ord(".")] = CODES.index("-")  # the other way to write a gap
    return bytes(table)


TABLE = _table()
COMPLEMENT = bytes(VOCABULARY.complement) + bytes(range(len(CODES), 256))


def encode(letters: bytes) -> bytes:
    """One byte a nucleotide, its token (0…16); `INVALID` for what is none. Upper and lower case are one."""
    return letters.translate(TABLE)


def reverse_complement(tokens: bytes) -> bytes:
    """The other strand, read in its own direction."""
    return tokens.translate(COMPLEMENT)[::-1]


def gc_share(counts: np.ndarray) -> float:
    """Share of G, C and S (either) among the nucleotides that are certain as to that (A, C, G, T, U, S, W), from counts by token; 0 where there is none."""
    strong, weak = (sum(int(counts[CODES.index(code)]) for code in group) for group in ("GCS", "ATUW"))
    return strong / max(strong + weak, 1)
