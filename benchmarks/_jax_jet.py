"""The quickstart's sa as a jitted function of JAX: its gradient, and its second-order forward pass by jet."""

from __future__ import annotations

import os
from typing import Any

from benchmarks._measuring import Call

LAYERS, HEADS, VOCABULARY = 4, 4, 257


def jax_calls(positions: int, width: int, rows: int) -> dict[str, Call]:
    """Return the calls "jax gradient" and "jax jet"; none, with a line that says so, without jax.

    Args:
        positions: sequence length N.
        width: d.
        rows: sequences in the batch.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
    try:
        import jax  # pyright: ignore[reportMissingImports]
        from jax.experimental import jet  # pyright: ignore[reportMissingImports]
    except ImportError:
        print("jax is not installed (the extra `peers`): not measured")
        return {}
    params, batch = _params(jax, width), _batch(jax, positions, rows)
    direction = jax.tree.map(lambda leaf: 0.1 * jax.random.normal(jax.random.key(1), leaf.shape), params)
    leaves, structure = jax.tree.flatten(params)
    steps = jax.tree.leaves(direction)

    def loss(*given: Any) -> Any:
        return _loss(jax, jax.tree.unflatten(structure, given), *batch)

    gradient = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(leaves)))))
    second = jax.jit(
        lambda at, along: jet.jet(loss, at, [[step, step * 0] for step in along]),
    )
    return {
        "jax gradient": lambda: jax.block_until_ready(gradient(*leaves)),
        "jax jet": lambda: jax.block_until_ready(second(leaves, steps)),
    }


def _params(jax: Any, width: int) -> dict[str, Any]:
    """Return weights shaped like those of the model of ours."""
    keys = iter(jax.random.split(jax.random.key(0), 64))

    def matrix(*shape: int) -> Any:
        return 0.02 * jax.random.normal(next(keys), shape)

    ones, zeros = jax.numpy.ones, jax.numpy.zeros
    blocks = [
        {
            "norms": [(ones(width), zeros(width)), (ones(width), zeros(width))],
            "qkv": (matrix(width, 3 * width), zeros(3 * width)),
            "out": (matrix(width, width), zeros(width)),
            "up": (matrix(width, 4 * width), zeros(4 * width)),
            "down": (matrix(4 * width, width), zeros(width)),
        }
        for _ in range(LAYERS)
    ]
    head = (matrix(width, VOCABULARY), zeros(VOCABULARY))
    return {
        "tokens": matrix(VOCABULARY + 1, width),
        "blocks": blocks,
        "norm": (ones(width), zeros(width)),
        "head": head,
    }


def _batch(jax: Any, positions: int, rows: int) -> tuple[Any, Any]:
    """Return random inputs and one-hot targets."""
    inputs, targets = jax.random.randint(jax.random.key(2), (2, rows, positions), 0, VOCABULARY)
    return inputs, jax.nn.one_hot(targets, VOCABULARY)


def _loss(jax: Any, params: dict[str, Any], inputs: Any, targets: Any) -> Any:
    """Return the mean cross entropy of a pre-norm transformer with rotary attention over all positions."""
    numpy = jax.numpy
    x = params["tokens"][inputs]
    rows, positions, width = x.shape
    size = width // HEADS
    rate = 10_000.0 ** (-numpy.arange(0, size, 2) / size)
    angle = numpy.arange(positions)[:, None] * rate
    cos, sin = numpy.cos(angle)[:, None], numpy.sin(angle)[:, None]

    def normed(x: Any, affine: Any) -> Any:
        c = x - x.mean(-1, keepdims=True)
        return c * jax.lax.rsqrt((c * c).mean(-1, keepdims=True) + 1e-5) * affine[0] + affine[1]

    def turned(u: Any) -> Any:
        a, b = u[..., : size // 2], u[..., size // 2 :]
        return numpy.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    for block in params["blocks"]:
        qkv = normed(x, block["norms"][0]) @ block["qkv"][0] + block["qkv"][1]
        q, k, v = (
            qkv[..., part * width : (part + 1) * width].reshape(rows, positions, HEADS, size) for part in range(3)
        )
        scores = numpy.einsum("bnhk,bmhk->bhnm", turned(q), turned(k)) * size**-0.5
        weights = numpy.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
        weights = weights / weights.sum(-1, keepdims=True)
        joined = numpy.einsum("bhnm,bmhk->bnhk", weights, v).reshape(rows, positions, width)
        x = x + joined @ block["out"][0] + block["out"][1]
        hidden = normed(x, block["norms"][1]) @ block["up"][0] + block["up"][1]
        hidden = 0.5 * hidden * (1 + jax.lax.erf(hidden * 2**-0.5))
        x = x + hidden @ block["down"][0] + block["down"][1]
    logits = normed(x, params["norm"]) @ params["head"][0] + params["head"][1]
    logits = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    return (numpy.log(numpy.exp(logits).sum(-1)) - (logits * targets).sum(-1)).mean()
