"""Evo 2 (Brixi et al. 2025) as an oracle of nucleotides, by its own package: github.com/ArcInstitute/evo2, which needs
CUDA. What is taken of it, as its README and its scoring.py have it:

- ``evo2.Evo2(model_name)``: loads a published checkpoint, e.g. evo2_1b_base, from Hugging Face's cache or the hub, and
  places it itself. ``.model`` is its torch module.
- ``.tokenizer.tokenize(text)``: a list of the UTF-8 bytes.
- ``evo(input_ids)`` with integers (B, N): ``(outputs, embeddings)``, ``outputs[0]`` being the logits (B, N, 512) of the
  next byte at each position.

Its own ``score_sequences`` scores as `text_oracle` does: without a token for the beginning the first nucleotide is
given, the others' mean log-likelihood is the score.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

SHORTEST_CONTEXT = 8192  # bytes that every published checkpoint reads at least
FAILURES = (ValueError, RuntimeError, OSError, KeyError, ImportError, AttributeError, AssertionError)


def load_evo2(name: str) -> Any:
    """Return the loaded ``Evo2``. Errors: ``RuntimeError`` of one line where the package is missing; ``ValueError`` of
    two lines where it has no such checkpoint, or cannot load it."""
    try:
        evo2 = importlib.import_module("evo2")
    except ImportError as error:
        raise RuntimeError(
            f"oracle=evo2:{name} needs the package evo2 ({error}); install it as github.com/ArcInstitute/evo2 says, "
            "on a machine with CUDA"
        ) from None
    try:
        return evo2.Evo2(name)
    except FAILURES as error:  # of hub, CUDA or weights: it is the checkpoint that cannot be had
        said = (str(error).strip().splitlines() or [""])[0][:200]
        raise ValueError(
            f"oracle=evo2:{name}: the package evo2 cannot load it\n({type(error).__name__}: {said})"
        ) from None


def device_of(evo: Any) -> torch.device:
    """Return the device that the model's first layer was placed on."""
    return next(evo.model.parameters()).device


def context_of(evo: Any) -> int:
    """Return how many bytes the model reads at a time."""
    return getattr(getattr(evo.model, "config", None), "max_seqlen", None) or SHORTEST_CONTEXT


def encode(evo: Any, text: str) -> list[int]:
    return [int(token) for token in evo.tokenizer.tokenize(text)]


def logits(evo: Any, tokens_BN: Tensor) -> Tensor:
    """Return (B, N, V): the logits of the byte after each position."""
    outputs, _ = evo(tokens_BN.int())
    return outputs[0]


def weights(evo: Any) -> dict[str, Tensor]:
    """Return the model's tensors; what else a layer keeps in its state (an FP8 recipe) is none."""
    model: nn.Module = evo.model
    return {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
