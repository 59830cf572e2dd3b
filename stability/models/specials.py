"""Special tokens of a protein's tracks, the first of every vocabulary.

No import of torch: many processes that only read files need them, too.
"""

from __future__ import annotations

SPECIALS = ("PAD", "MASK", "UNK", "BOS", "EOS")
PAD, MASK, UNK, BOS, EOS = range(len(SPECIALS))
