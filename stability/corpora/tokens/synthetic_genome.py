"""A synthetic genome, the default of `data=dna`, equal on every machine by integer arithmetic.

Four chromosomes of 500,000 nucleotides, drawn from a counter (SplitMix64: Steele et al. 2014). Each consists of genes
and the stretches between them:

- *codon structure*: a gene is ATG, 100 to 399 codons, a stop codon. A codon's weight is its amino acid's weight
  (roughly E. coli's, in per mille), divided among synonyms in proportion to the local GC content at the third position.
  One gene in two is on the other strand.
- *GC drift*: the local GC content moves from 35 to 65 % and back in a triangle of 200,000 nucleotides. Between genes
  (50 to 249 nucleotides) letters are independent with this content.
- *repeats*: one gene in sixteen is followed by one of six elements, 800 to 1,300 nucleotides on either strand. Each
  copy has 2 % of its letters redrawn.

Results show how a model learns such structure, and nothing about any organism.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

SEED = 0
NUM_CHROMOSOMES, LENGTH = 4, 500_000
PERIOD, LOWEST_GC, HIGHEST_GC = 200_000, 350, 650  # nucleotides; per mille
NUM_ELEMENTS, GENES_PER_ELEMENT, REDRAWN_PER_MILLE = 6, 16, 20
DESCRIPTION = "synthetic genome (no data.path given; codon structure, repeats, GC drift; it is no organism's)"
LETTERS = b"ACGT"

# codons in the order TTT, TTC, TTA, …: first, second, third letter over TCAG (NCBI translation table 11); * is stop
CODE = "FFLLSSSSYY**CC*WLLLLPPPPHHQQRRRRIIIMTTTTNNKKSSRRVVVVAAAADDEEGGGG"
CODONS = tuple((first + second + third).encode() for first in "TCAG" for second in "TCAG" for third in "TCAG")
STOPS = tuple(codon for codon, acid in zip(CODONS, CODE, strict=True) if acid == "*")
ACIDS = "ACDEFGHIKLMNPQRSTVWY"
PER_MILLE = dict(
    zip(ACIDS, (95, 12, 51, 58, 39, 74, 23, 60, 44, 107, 28, 39, 44, 44, 55, 58, 54, 71, 15, 29), strict=True)
)
STRAND = bytes.maketrans(b"ACGT", b"TGCA")


def chromosomes() -> Iterator[tuple[str, bytes]]:
    """Yield (name, letters A, C, G, T) of each chromosome."""
    draws = Draws(SEED)
    elements = [_letters(draws, 800 + draws.draw_one(501), 500) for _ in range(NUM_ELEMENTS)]
    for number in range(NUM_CHROMOSOMES):
        yield f"synthetic_{number + 1}", _chromosome(draws, elements)


class Draws:
    """A stream of random integers: SplitMix64 of a counter.

    It is equal on every machine and with every numpy version.
    """

    def __init__(self, seed: int):
        self._counter = seed << 40

    def draw_one(self, bound: int) -> int:
        return int(self.draw_below(bound, 1)[0])

    def draw_below(self, bound: int, num: int) -> np.ndarray:
        """Draw ``num`` integers in [0, bound), int64.

        The bias of the remainder is below 2⁻³².
        """
        z = np.arange(self._counter + 1, self._counter + 1 + num, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self._counter += num
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) % np.uint64(bound)).astype(np.int64)


def _chromosome(draws: Draws, elements: list[bytes]) -> bytes:
    parts, length = [], 0
    while length < LENGTH:
        phase = length % PERIOD
        gc = LOWEST_GC + (HIGHEST_GC - LOWEST_GC) * min(phase, PERIOD - phase) // (PERIOD // 2)
        stretch = [_letters(draws, 50 + draws.draw_one(200), gc), _either_strand(draws, _gene(draws, gc))]
        if draws.draw_one(GENES_PER_ELEMENT) == 0:
            stretch.append(_either_strand(draws, _copy(draws, elements[draws.draw_one(NUM_ELEMENTS)])))
        parts += stretch
        length += sum(map(len, stretch))
    return b"".join(parts)[:LENGTH]


def _letters(draws: Draws, num: int, gc: int) -> bytes:
    strong, second = draws.draw_below(1000, num) < gc, draws.draw_below(2, num)
    return np.frombuffer(LETTERS, dtype=np.uint8)[np.where(strong, 1 + second, 3 * second)].tobytes()


def _gene(draws: Draws, gc: int) -> bytes:
    ends = np.cumsum(codon_weights(gc))
    chosen = np.searchsorted(ends, draws.draw_below(int(ends[-1]), 100 + draws.draw_one(300)), side="right")
    return b"ATG" + b"".join(CODONS[index] for index in chosen.tolist()) + STOPS[draws.draw_one(len(STOPS))]


def codon_weights(gc: int) -> np.ndarray:
    """Return the integer weight of each of `CODONS`, 0 for a stop."""
    shares = [gc if codon[2:] in b"GC" else 1000 - gc for codon in CODONS]
    total = {acid: sum(share for share, other in zip(shares, CODE, strict=True) if other == acid) for acid in PER_MILLE}
    return np.array(
        [1000 * PER_MILLE.get(acid, 0) * share // total.get(acid, 1) for acid, share in zip(CODE, shares, strict=True)],
        dtype=np.int64,
    )


def _copy(draws: Draws, element: bytes) -> bytes:
    letters = np.frombuffer(element, dtype=np.uint8)
    redrawn = draws.draw_below(1000, len(letters)) < REDRAWN_PER_MILLE
    return (
        np.where(redrawn, np.frombuffer(LETTERS, dtype=np.uint8)[draws.draw_below(4, len(letters))], letters)
        .astype(np.uint8)
        .tobytes()
    )


def _either_strand(draws: Draws, letters: bytes) -> bytes:
    return letters.translate(STRAND)[::-1] if draws.draw_one(2) else letters
