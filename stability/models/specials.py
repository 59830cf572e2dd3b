"""Special tokens of a protein's tracks, the first of every vocabulary. No torch: what reads files in many processes
needs them, too."""

from __future__ import annotations

SPECIALS = ("PAD", "MASK", "UNK", "BOS", "EOS")
PAD, MASK, UNK, BOS, EOS = range(len(SPECIALS))
