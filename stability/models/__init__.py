"""Models made of parts; here the legend of the axis letters in tensor names, and the proteins' special tokens.

A name ends in its axes: ``x_BND`` is batch × positions × width.

B batch · N positions · D model width · H heads · K head width · V vocabulary · W window edges per node · R rank · X
edge hidden width · S streams, or states of a diffusion's graph · C condition width · J context positions · E edges · P
unordered pairs of positions · A atoms of a residue, with X the three coordinates · F dimensions of a code · M points ·
T q, k, v (attention) or the two directions of an edge (consensus)
"""

from __future__ import annotations

# the first of every vocabulary of a protein's tracks; no import of torch, for processes that only read files
SPECIALS = ("PAD", "MASK", "UNK", "BOS", "EOS")
PAD, MASK, UNK, BOS, EOS = range(len(SPECIALS))
