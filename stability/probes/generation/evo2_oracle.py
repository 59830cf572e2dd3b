"""Use Evo 2 (Brixi et al. 2025) as an oracle for nucleotides, through its own package.

The package, github.com/ArcInstitute/evo2, needs CUDA. Interface used here, from its README and scoring.py:

- ``evo2.Evo2(model_name)``: loads a published checkpoint, e.g. evo2_1b_base, from Hugging Face's cache or the hub, and
chooses its device. ``.model`` is the torch module.
- ``.tokenizer.tokenize(text)``: a list of UTF-8 bytes.
- ``evo(input_ids)`` with integers (B, N): ``(outputs, embeddings)``; ``outputs[0]`` are the next byte's logits (B, N,
512) at each position.

Its own ``score_sequences`` scores as `text_oracle` does: no token for the beginning; the first nucleotide is given, and
the score is the mean log-likelihood of the others.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

SHORTEST_CONTEXT = 8192  # bytes; no published checkpoint has fewer
FAILURES = (ValueError, RuntimeError, OSError, KeyError, ImportError, AttributeError, AssertionError)


def load_evo2(name: str) -> Any:
    """Return the loaded ``Evo2``.

    Raises:
        RuntimeError: the package is missing; one line.
        ValueError: no such checkpoint, or loading failed; two lines.
    """
    try:
        evo2 = importlib.import_module("evo2")
    except ImportError as error:
        raise RuntimeError(
            f"oracle=evo2:{name} needs the package evo2 ({error}); install it as github.com/ArcInstitute/evo2 says, "
            "on a machine with CUDA"
        ) from None
    try:
        return evo2.Evo2(name)
    except FAILURES as error:  # from hub, CUDA or weights: the checkpoint is unavailable
        said = (str(error).strip().splitlines() or [""])[0][:200]
        raise ValueError(
            f"oracle=evo2:{name}: the package evo2 cannot load it\n({type(error).__name__}: {said})"
        ) from None


def device_of(evo: Any) -> torch.device:
    """Return the device of the model's first layer."""
    return next(evo.model.parameters()).device


def context_of(evo: Any) -> int:
    """Return the model's context length in bytes."""
    return getattr(getattr(evo.model, "config", None), "max_seqlen", None) or SHORTEST_CONTEXT


def encode(evo: Any, text: str) -> list[int]:
    return [int(token) for token in evo.tokenizer.tokenize(text)]


def logits(evo: Any, tokens_BN: Tensor) -> Tensor:
    """Return the next byte's logits at each position, (B, N, V)."""
    outputs, _ = evo(tokens_BN.int())
    return outputs[0]


def weights(evo: Any) -> dict[str, Tensor]:
    """Return the model's tensors, without other state (FP8 recipes)."""
    model: nn.Module = evo.model
    return {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
