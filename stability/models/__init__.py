"""Models made of parts; here the legend of the axis letters in tensor names, and the proteins' special tokens.

A name ends in its axes: ``x_BND`` is batch × positions × width.

Every model: B is the batch, N positions, J context positions, D the model's width, V the vocabulary. H is heads, K the
width of one. C is the width of a condition, S streams or the states of a diffusion's graph.

Attention: T is queries, keys and values. Consensus: E is edges, P unordered pairs of positions, W edges of a node's
window, R the rank, X the edge network's hidden width. T is the two directions of an edge.

Proteins: A is atoms of a residue, X their three coordinates, F the dimensions of a code, M points.
"""

from __future__ import annotations

# the first of every vocabulary of a protein's tracks; no import of torch, for processes that only read files
SPECIALS = ("PAD", "MASK", "UNK", "BOS", "EOS")
PAD, MASK, UNK, BOS, EOS = range(len(SPECIALS))
