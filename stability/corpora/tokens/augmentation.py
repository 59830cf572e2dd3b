"""Nucleotides as tokens, random changes of training windows, and their storage in a corpus.

Held-out windows are unchanged. A nucleotide has one token for each IUPAC code, and one for the gap (Cornish-Bowden,
Nucleic Acids Res. 13:3021, 1985).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Generator, Tensor

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


class AbstractAugmentation:
    """Base of a token corpus's augmentation. A subclass implements `augmented`.

    Attributes:
        name: key of the augmentation in a corpus's folder.
        array_names: names of arrays possibly stored there, each a 1-D attribute or None.
    """

    name: ClassVar[str]
    array_names: ClassVar[tuple[str, ...]] = ()

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays stored beside the tokens, by name."""
        found = {name: getattr(self, name) for name in self.array_names}
        return {name: array for name, array in found.items() if array is not None}

    def require(self, vocabulary: Vocabulary | None, num_stretches: int) -> None:
        """Check the fit to a corpus with ``num_stretches`` training stretches.

        Raises:
            AssertionError: the augmentation does not fit.
        """

    def augmented(
        self, tokens_BN: Tensor, vocabulary: Vocabulary | None, stretch_B: np.ndarray, generator: Generator
    ) -> Tensor:
        """Return the changed training windows.

        Args:
            tokens_BN: windows of tokens.
            vocabulary: the corpus's vocabulary, if known.
            stretch_B: index of each window's stretch.
            generator: random generator.
        """
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class ReverseComplement(AbstractAugmentation):
    """Replaces a window by its reverse complement with probability one half.

    Attributes:
        train_are_rna: uint16, 1 for training stretches with A paired to U, else 0; None: there are none.
    """

    train_are_rna: np.ndarray | None = None

    name = "reverse_complement"
    array_names = ("train_are_rna",)

    def require(self, vocabulary: Vocabulary | None, num_stretches: int) -> None:
        assert vocabulary is not None and vocabulary.complement, "only nucleotides have a reverse complement"
        assert self.train_are_rna is None or len(self.train_are_rna) == num_stretches, (
            "one number for each training stretch"
        )

    def augmented(
        self, tokens_BN: Tensor, vocabulary: Vocabulary | None, stretch_B: np.ndarray, generator: Generator
    ) -> Tensor:
        assert vocabulary is not None
        turned_B = torch.rand(len(tokens_BN), generator=generator, device=generator.device).cpu() < 0.5
        other_BN = torch.tensor(vocabulary.complement)[tokens_BN].flip(1)
        if self.train_are_rna is not None:
            rna_B = torch.from_numpy(self.train_are_rna[stretch_B] == 1)
            other_BN = torch.where(rna_B[:, None], in_rna(other_BN), other_BN)
        return torch.where(turned_B[:, None], other_BN, tokens_BN)


# all that a corpus's folder may contain
AUGMENTATIONS: tuple[type[AbstractAugmentation], ...] = (ReverseComplement,)
NAMES = tuple(each.name for each in AUGMENTATIONS)
ARRAY_NAMES = tuple(name for each in AUGMENTATIONS for name in each.array_names)


def load_augmentation(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> AbstractAugmentation | None:
    """Return the augmentation stored in a corpus's folder, if any.

    Args:
        meta: the folder's description.
        arrays: stored arrays among `ARRAY_NAMES`.
    """
    return next((each(**arrays) for each in AUGMENTATIONS if meta.get(each.name)), None)
