"""Nucleotides as tokens: every code of the IUPAC (Cornish-Bowden, Nucleic Acids Res. 13:3021, 1985) is one, and so is
the gap."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from stability.corpora.tokens.vocabulary import Vocabulary

CODES = "ACGTURYSWKMBDHVN-"
# what pairs with each: R = A|G with Y = C|T, and so on; U pairs with A, A with T (with U in RNA: see `in_rna`)
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
    """Return one byte a nucleotide, its token (0…16); `INVALID` for what is none. Upper and lower case are one."""
    return letters.translate(TABLE)


def reverse_complement(tokens: bytes) -> bytes:
    """Return the other strand, read in its own direction."""
    return tokens.translate(COMPLEMENT)[::-1]


def either_strand(tokens: bytes) -> bytes:
    """Return the same bytes for a sequence, its reverse complement and its transcript: of both strands, with T for U,
    what comes first in the alphabet."""
    as_dna = tokens.translate(AS_DNA)
    return min(as_dna, reverse_complement(as_dna))


def are_rna(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return whether each record ``tokens[start:stop]`` is RNA (bool), in which A pairs with U: it holds U and no T; or
    it holds neither, while other records hold U and none holds T."""
    bounds = list(zip(starts.tolist(), stops.tolist(), strict=True))
    with_t, with_u = (
        np.array([bool((tokens[start:stop] == token).any()) for start, stop in bounds]) for token in (T, U)
    )
    return ~with_t & (with_u | (with_u.any() and not with_t.any()))


def in_rna(complement: Tensor) -> Tensor:
    """Return the complement of tokens of RNA, from what `Vocabulary.complement` gives: U where it has T."""
    return complement.masked_fill(complement == T, U)


def gc_share(counts: np.ndarray) -> float:
    """Return the share of G, C and S (either) among the nucleotides that are certain as to that (A, C, G, T, U, S, W),
    from counts by token; 0 where there is none."""
    strong, weak = (sum(int(counts[CODES.index(code)]) for code in group) for group in ("GCS", "ATUW"))
    return strong / max(strong + weak, 1)
