"""The recurrences as they are written, a position at a time, and inputs for them."""

from __future__ import annotations

import torch
from torch import Tensor

NAMES = ("q", "k", "v", "beta", "log_decay")
RULES = ("scalar", "features", "delta", "delta_scalar", "delta_features")


def by_loop(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, log_decay: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Return S_tᵀ q_t with S_t = Diag(a_t) S_{t−1} + k_t w_tᵀ, where w_t = v_t, or with β the delta rule's."""
    state, found = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]), []
    for t in range(v.shape[2]):
        state = state if log_decay is None else state * log_decay[:, :, t, :, None].exp()
        write = v[:, :, t]
        if beta is not None:
            write = beta[:, :, t, None] * (write - (k[:, :, t, :, None] * state).sum(-2))
        state = state + k[:, :, t, :, None] * write[:, :, None]
        found.append((q[:, :, t, :, None] * state).sum(-2))
    return torch.stack(found, 2)


def drawn(
    rule: str, seed: int, batch: int = 1, heads: int = 1, num: int = 20, keys: int = 5, values: int = 6, *,
    padding: bool = False, dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:  # fmt: skip
    """Return what a rule takes, by name: keys of length 1, β in [0, 1), ln a of which some are 0 and some −20; with
    ``padding`` k, β and ln a are 0 at a third of the positions. q, k and v lie as a model has them, (B, N, H, ·)."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda width: torch.randn(batch, num, heads, width, generator=generator).transpose(1, 2)  # noqa: E731
    inputs = {"q": normal(keys), "k": torch.nn.functional.normalize(normal(keys), dim=-1), "v": normal(values)}
    if "delta" in rule:
        inputs["beta"] = torch.rand(batch, heads, num, generator=generator)
    if rule != "delta":
        width = keys if "features" in rule else 1
        log_decay = -torch.rand(batch, heads, num, width, generator=generator)
        extreme = torch.rand(log_decay.shape, generator=generator)
        inputs["log_decay"] = log_decay.masked_fill(extreme < 0.1, 0.0).masked_fill(extreme > 0.9, -20.0)
    if padding:
        is_padding = torch.rand(batch, 1, num, generator=generator) < 1 / 3
        for name in inputs.keys() & {"k", "beta", "log_decay"}:
            mask = is_padding if name == "beta" else is_padding[..., None]
            inputs[name] = inputs[name].masked_fill(mask, 0.0)
    return {
        name: each.to(dtype if name in ("q", "k", "v") else torch.promote_types(dtype, torch.float32))
        for name, each in inputs.items()
    }
