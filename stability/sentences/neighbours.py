"""Nearest embeddings by cosine, and clusters."""

from __future__ import annotations

import numpy as np
from scipy.cluster.vq import kmeans2

BLOCK = 4096  # embeddings compared at once
RESTARTS, ITERATIONS = 8, 100  # of k-means; the restart with the least inertia is taken


def unit_rows(x_MD: np.ndarray) -> np.ndarray:
    """Return the rows divided by their lengths, in float64; zero stays zero."""
    wide_MD = x_MD.astype(np.float64)
    return wide_MD / np.maximum(np.linalg.norm(wide_MD, axis=1, keepdims=True), 1e-12)


def find_nearest(queries_QD: np.ndarray, corpus_MD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices and cosines of each query's k nearest rows, nearest first; of equal ones the earlier first.

    Memory: queries × (k + block) cosines.

    Args:
        queries_QD: embeddings of the queries.
        corpus_MD: embeddings to search.
        k: number of rows, at most all of them.

    Returns:
        Two arrays (Q, k).
    """
    queries = unit_rows(queries_QD)
    found = np.empty((len(queries), 0)), np.empty((len(queries), 0), dtype=np.int64)
    for start in range(0, len(corpus_MD), BLOCK):
        cosines = queries @ unit_rows(corpus_MD[start : start + BLOCK]).T
        numbers = np.broadcast_to(np.arange(start, start + cosines.shape[1]), cosines.shape)
        scores, indices = (np.concatenate(pair, axis=1) for pair in zip(found, (cosines, numbers), strict=True))
        best = np.lexsort((indices, -scores), axis=1)[:, :k]
        found = np.take_along_axis(scores, best, 1), np.take_along_axis(indices, best, 1)
    return found[1], found[0]


def cluster(x_MD: np.ndarray, clusters: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's cluster (M) and the centres, by k-means with k-means++ starts.

    Args:
        x_MD: embeddings.
        clusters: number of clusters, at most that of different rows.
        seed: seed of the starts.

    Raises:
        ValueError: there are fewer different rows than clusters.
    """
    points = x_MD.astype(np.float64)
    if (num := len(np.unique(points, axis=0))) < clusters:
        raise ValueError(f"clusters={clusters}: there are {num} different embeddings; give at most as many clusters")
    draws = np.random.default_rng(seed)
    runs = [kmeans2(points, clusters, iter=ITERATIONS, minit="++", missing="warn", rng=draws) for _ in range(RESTARTS)]
    centres, labels = min(runs, key=lambda run: float(((points - run[0][run[1]]) ** 2).sum()))
    return labels, centres
