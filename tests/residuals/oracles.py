"""Hyper-connections token by token in plain Python floats, from the formulas alone; parameters come in as nested lists
by the names of the formulas."""

from __future__ import annotations

import itertools
import math


def rms_normed(vector, gain):
    root = math.sqrt(sum(value * value for value in vector) / len(vector))
    return [value / root * (1 + g) for value, g in zip(vector, gain, strict=True)]


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


def product(vector, matrix):
    return [sum(vector[row] * matrix[row][column] for row in range(len(vector))) for column in range(len(matrix[0]))]


def hc(streams, p):
    """(pre, A, post) of one token's streams X (n × C)."""
    n = len(streams)
    pre, mix, post = [0.0] * n, [[0.0] * n for _ in range(n)], [0.0] * n
    for s, stream in enumerate(streams):
        dynamic = product(rms_normed(stream, p["gain"]), p["weight"])
        alpha = [p["S_a"][s][k] + p["a"][0] * math.tanh(dynamic[k]) for k in range(1 + n)]
        pre[s], mix[s] = alpha[0], alpha[1:]
        post[s] = p["S_b"][s] + p["a"][1] * math.tanh(dynamic[1 + n])
    return pre, mix, post


def gates(streams, p):
    """(pre, post, mixing logits) of mHC and mHC-lite."""
    n, flat = len(streams), [value for stream in streams for value in stream]
    dynamic = product(rms_normed(flat, p["gain"]), p["weight"])
    pre = [sigmoid(p["a"][0] * dynamic[s] + p["b_pre"][s]) for s in range(n)]
    post = [2 * sigmoid(p["a"][1] * dynamic[n + s] + p["b_post"][s]) for s in range(n)]
    return pre, post, [p["a"][2] * value + bias for value, bias in zip(dynamic[2 * n :], p["b_mix"], strict=True)]


def scaled(matrix, iterations):
    """Sinkhorn and Knopp on exp(matrix), its columns first, by plain division."""
    n, m = len(matrix), [[math.exp(value) for value in row] for row in matrix]
    for _ in range(iterations):
        for t in range(n):
            total = sum(m[s][t] for s in range(n))
            for s in range(n):
                m[s][t] /= total
        for s in range(n):
            total = sum(m[s])
            m[s] = [value / total for value in m[s]]
    return m


def mhc(streams, p):
    n = len(streams)
    pre, post, logits = gates(streams, p)
    return pre, scaled([logits[n * s : n * (s + 1)] for s in range(n)], 20), post


def mhc_lite(streams, p):
    n = len(streams)
    pre, post, logits = gates(streams, p)
    weights = [math.exp(value) for value in logits]
    mix = [[0.0] * n for _ in range(n)]
    for weight, order in zip(weights, itertools.permutations(range(n)), strict=True):
        for s in range(n):
            mix[s][order[s]] += weight / sum(weights)
    return pre, mix, post


def updated(streams, coefficients, branch):
    """X' = AᵀX + post ⊗ F(Σ pre X) of one token."""
    pre, mix, post = coefficients
    n, width = len(streams), len(streams[0])
    y = branch([sum(pre[s] * streams[s][c] for s in range(n)) for c in range(width)])
    return [[sum(mix[s][t] * streams[s][c] for s in range(n)) + post[t] * y[c] for c in range(width)] for t in range(n)]
