"""A tensor's name ends in its axes, ``x_BND`` being batch × positions × width; this is the one legend of their letters.

B batch · N positions · D model width · H heads · K head width · V vocabulary · W window edges per node · R rank · X
edge hidden width · S streams, or states of a diffusion's graph · C condition width · J context positions · E edges · P
unordered pairs of positions · A atoms of a residue, where X is the three coordinates · F dimensions of a code · M
points · T q, k, v (attention) or the two directions of an edge (consensus)
"""
