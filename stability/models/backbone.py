"""The pre-norm transformer around any mechanism, residual scheme and norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from stability.models.auxiliary import joined, parted
from stability.models.block import Block, Context
from stability.models.condition import ConditionShape, FinalModulation, NoiseLevel
from stability.models.init import OwnInit
from stability.models.precision import at_least_float32
from stability.models.shared import hold_once

Readout = Callable[[Tensor, Tensor, Tensor | None], Any]
Pool = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class HeadShape:
    """The linear map at a model's end: whether it has a bias, and whether all of it starts at zero.

    ``tied_to``: the name within the embedding of the module (`nn.Embedding`, or what has such a ``weight``) whose first
    rows are the head's weight; the model then holds that matrix once. None: the head has a weight of its own.
    """

    bias: bool = True
    zero: bool = False
    tied_to: str | None = None


class TiedHead(nn.Module):
    """The head of a model whose embedding is the weight: it holds a bias, or nothing."""

    bias: nn.Parameter | None

    def __init__(self, num_outputs: int, bias: bool):
        super().__init__()
        self.num_outputs = num_outputs
        self.register_parameter("bias", nn.Parameter(torch.zeros(num_outputs)) if bias else None)


class Backbone(OwnInit):
    """Tokens (B, N) → logits (B, N, V): embedding, blocks, final norm, linear head. Positions enter
    inside the mixers (RoPE) or with the embedding.

    ``embedding``: whatever turns the inputs into (B, N, D): an `nn.Embedding` of tokens, patches of images. ``pool``:
    what the head reads where it does not read every position: ``pool(hidden_BND, mask_BN)`` → (B, M, D), the logits
    then being (B, M, V); None: every position.

    With cross branches in the blocks, context tokens (B, J) are embedded by the same embedding and normed once: every
    block reads the same context, on the scale of the normed source that it is compared with. ``condition``: the model
    reads a noise level (B,), which modulates its blocks (built for it) and its final norm; its head starts at zero.
    ``loops``: how often the state passes the blocks, one after another, with the same weights. ``dropout``: the share
    of what enters the first block that is dropped in training mode, after the embedding and its positions (as nanoGPT
    does); a context is read whole. ``gives_losses``: whether `forward` can be asked for the blocks' own losses.
    """

    # what is built in here plays these roles (`stability.config.groups`), as far as it says no other of its own parts
    own_roles: ClassVar = {
        "embedding": "embedding",
        "final_norm": "norm",
        "context_norm": "norm",
        "head": "head",
        "noise_level": "condition",
        "final_modulation": "condition",
    }
    gives_losses: ClassVar[bool] = True

    def __init__(
        self,
        embedding: nn.Module,
        num_outputs: int,
        width: int,
        blocks: list[Block],
        final_norm: nn.Module,
        context_norm: nn.Module | None = None,
        condition: ConditionShape | None = None,
        pool: Pool | None = None,
        head: HeadShape = HeadShape(),
        loops: int = 1,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.embedding, self.pool, self.tied_to = embedding, pool, head.tied_to
        self.dropout = nn.Dropout(dropout)
        self.blocks, self.loops = nn.ModuleList(blocks), loops
        hold_once(self.blocks)
        self.final_norm = final_norm
        tied = head.tied_to is not None
        self.head = TiedHead(num_outputs, head.bias) if tied else nn.Linear(width, num_outputs, head.bias)
        self.context_norm = context_norm
        self.noise_level = None if condition is None else NoiseLevel(condition)
        self.final_modulation = None if condition is None else FinalModulation(condition.width, width)
        # with the modulations' zeros, an untrained model says log s = −log(e^σ − 1) − log V: every token alike
        self.starts_at_zero = head.zero or condition is not None
        if self.starts_at_zero:
            for parameter in self.head.parameters():
                nn.init.zeros_(parameter)

    @property
    def own_init(self) -> frozenset[str]:
        return frozenset(f"head.{name}" for name, _ in self.head.named_parameters() if self.starts_at_zero)

    def forward(
        self,
        tokens_BN: Any,
        mask_BN: Tensor | None = None,
        *,
        context_BJ: Tensor | None = None,
        context_mask_BJ: Tensor | None = None,
        sigma_B: Tensor | None = None,
        readout: Readout | None = None,
        losses: bool = False,
        **inputs: Any,
    ) -> Any:
        """Return the logits (B, N, V), or what ``readout`` makes of their inputs. ``tokens_BN``: what the embedding
        reads. ``context_BJ``: context tokens, needed exactly where there are cross branches; masks: True where a token
        is valid. ``sigma_B``: each sequence's noise level, needed exactly where the model is conditioned. ``readout``:
        called as ``readout(hidden_BND, weight_VD, bias_V)`` with what the head would read and the head's parameters
        (bias None where it has none); its result stands for the logits (a loss that never makes them all). ``losses``:
        whether the result comes with the sum of the losses that parts of the blocks have of their own (`WithLoss`),
        where any has one.

        ``inputs``: what mixers take besides, e.g. ``edges=`` for ``sc`` with ``graph=given``. Errors: ``ValueError``
        for a context or a noise level that is missing or that nothing reads, and for an input that no mixer takes.
        """
        context, condition_BC = self._context(context_BJ, context_mask_BJ), self._condition(sigma_B)
        if inputs:
            self._check(inputs)
        residual: Any = cast(Block, self.blocks[0]).mixer_residual
        state, own = residual.enter(self.dropout(at_least_float32(self.embedding(tokens_BN)))), []
        for block in self.passed():
            state = parted(block(state, mask_BN, context, inputs, condition_BC), own)
        hidden_BND = residual.leave(state, self.final_norm)
        if self.final_modulation is not None:
            hidden_BND = self.final_modulation(condition_BC).moved(hidden_BND)
        if self.pool is not None:
            hidden_BND = self.pool(hidden_BND, mask_BN)
        result = self._read(hidden_BND, readout)
        return joined(result, own) if losses else result

    def _read(self, hidden_BND: Tensor, readout: Readout | None) -> Any:
        if readout is None and isinstance(self.head, nn.Linear):
            return self.head(hidden_BND)
        return (readout or nn.functional.linear)(hidden_BND, self._head_weight(), self.head.bias)

    def passed(self) -> list[Block]:
        """Return the blocks in the order that the state passes them: all of them, ``loops`` times."""
        return cast(list[Block], [*self.blocks]) * self.loops

    def _head_weight(self) -> Tensor:
        """Return the weight (V, D) of the head, of a tied one the first V rows of the embedding's matrix."""
        if isinstance(self.head, nn.Linear):
            return self.head.weight
        weight: Any = self.embedding.get_submodule(cast(str, self.tied_to)).weight
        return weight if len(weight) == self.head.num_outputs else weight[: self.head.num_outputs]

    def _condition(self, sigma_B: Tensor | None) -> Tensor | None:
        if self.noise_level is None:
            if sigma_B is not None:
                raise ValueError(
                    "sigma_B is read by time-conditioned blocks only, and this model has none; its objective has no "
                    "noise level"
                )
            return None
        if sigma_B is None:
            raise ValueError("this model's blocks read the noise level; give sigma_B=, one per sequence")
        return self.noise_level(sigma_B)

    def _context(self, context_BJ: Tensor | None, context_mask_BJ: Tensor | None) -> Context | None:
        if self.context_norm is None:
            if context_BJ is not None or context_mask_BJ is not None:
                raise ValueError(
                    "context_BJ and context_mask_BJ are read by a cross mechanism only, and this model has none; "
                    "build it with cross=auto"
                )
            return None
        if context_BJ is None:
            raise ValueError("this model's cross mechanism needs a context; give context_BJ=, the context's tokens")
        return Context(self.context_norm(at_least_float32(self.embedding(context_BJ))), context_mask_BJ)

    def _check(self, inputs: dict[str, Any]) -> None:
        taken = frozenset().union(*(cast(Block, block).mixer_inputs for block in self.blocks))
        if unread := sorted(set(inputs) - taken):
            raise ValueError(
                f"{unread[0]}=: no mixer of this model takes it (edges= belongs to mechanism=sc with graph=given)"
            )


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def block_of(name: str) -> str:
    """Name the block of a model's parameter: "blocks.0.mixer" (ffn, mixer_norm, …) for what lies in a layer, the
    module's name for what does not."""
    parts = name.split(".")
    return ".".join(parts[:3] if parts[0] == "blocks" else parts[:1])
