"""Nucleotides as tokens: one for each IUPAC code, and one for the gap.

Cornish-Bowden, Nucleic Acids Res. 13:3021, 1985.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from stability.corpora.tokens.vocabulary import Vocabulary

CODES = "ACGTURYSWKMBDHVN-"
# the partner of each code: R = A|G with Y = C|T, and so on; U with A, A with T (in RNA with U: see `in_rna`)
PAIRS = "TGCAAYRSWMKVHDBN-"
T, U = CODES.index("T"), CODES.index("U")
INVALID = 255

VOCABULARY = Vocabulary(
    "nucleotides", tuple(code.encode() for code in CODES), complement=tuple(CODES.index(pair) for pair in PAIRS)
)


def _table() -> bytes:
    table = bytearray([INVALID] * 256)
    for token, code in enumerate(CODES):
        table[ord(code)] = table[ord(code.lower())] = token
    table[ord(".")] = CODES.index("-")  # the other way to write a gap
    return bytes(table)


TABLE = _table()
COMPLEMENT = bytes(VOCABULARY.complement) + bytes(range(len(CODES), 256))
AS_DNA = bytes(T if token == U else token for token in range(256))


def encode(letters: bytes) -> bytes:
    """Return one token (0…16) per byte; `INVALID` for other characters.

    Case is ignored.
    """
    return letters.translate(TABLE)


def reverse_complement(tokens: bytes) -> bytes:
    """Return the other strand, read in its own direction."""
    return tokens.translate(COMPLEMENT)[::-1]


def either_strand(tokens: bytes) -> bytes:
    """Return equal bytes for a sequence, its reverse complement and its transcript.

    The result is the alphabetically first strand, with T for U.
    """
    as_dna = tokens.translate(AS_DNA)
    return min(as_dna, reverse_complement(as_dna))


def are_rna(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return whether each record is RNA, with A paired to U (bool).

    A record with U and no T is RNA. One with neither is RNA if other records have U and none has T.

    Args:
        tokens: all records' tokens.
        starts: start of each record.
        stops: end of each record.
    """
    bounds = list(zip(starts.tolist(), stops.tolist(), strict=True))
    with_t, with_u = (
        np.array([bool((tokens[start:stop] == token).any()) for start, stop in bounds]) for token in (T, U)
    )
    return ~with_t & (with_u | (with_u.any() and not with_t.any()))


def in_rna(complement: Tensor) -> Tensor:
    """Return an RNA complement from `Vocabulary.complement`'s result, with U for T."""
    return complement.masked_fill(complement == T, U)


def gc_share(counts: np.ndarray) -> float:
    """Return the GC content from counts by token; 0 without nucleotides.

    This is the share of G, C and S (either) among A, C, G, T, U, S, W, the codes with known membership.
    """
    strong, weak = (sum(int(counts[CODES.index(code)]) for code in group) for group in ("GCS", "ATUW"))
    return strong / max(strong + weak, 1)
