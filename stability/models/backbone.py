"""The pre-norm transformer around any mechanism, residual scheme and norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from stability.models.block import Block, Context, attach_losses, split_loss
from stability.models.condition import ConditionShape, FinalModulation, NoiseLevel
from stability.models.init import OwnInit
from stability.models.passes import at_least_float32
from stability.models.scaling import Factors


class SharedByLayers(nn.Module):
    """A module made by each layer and shared by all after `hold_once`.

    Its parameters are then in the model's state and gradient once. Its constructor draws no random numbers and depends
    on no layer.
    """


def hold_once(model: nn.Module) -> None:
    """Let all layers below ``model`` share the first equal `SharedByLayers`.

    Equal means the same class and shapes of parameters. The first one remains a child of its own layer. The others are
    replaced by plain references, so no tensor has two names.
    """
    first: dict[object, SharedByLayers] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, SharedByLayers):
                kind = (type(child), tuple((key, value.shape) for key, value in child.named_parameters()))
                kept = first.setdefault(kind, child)
                if kept is not child:
                    delattr(parent, name)
                    parent.__dict__[name] = kept  # not registered as a child module


Readout = Callable[[Tensor, Tensor, Tensor | None], Any]
Pool = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class HeadShape:
    """The linear map at a model's end.

    Attributes:
        bias: whether it has a bias.
        zero: whether all of it starts at zero.
        tied_to: name of a module within the embedding (an `nn.Embedding` or another module with such a ``weight``). The
            first rows of its weight are the head's weight, so the model stores this matrix once. None: the head has its
            own weight.
    """

    bias: bool = True
    zero: bool = False
    tied_to: str | None = None


class TiedHead(nn.Module):
    """A head tied to the embedding: only a bias, or nothing."""

    bias: nn.Parameter | None

    def __init__(self, num_outputs: int, bias: bool):
        super().__init__()
        self.num_outputs = num_outputs
        self.register_parameter("bias", nn.Parameter(torch.zeros(num_outputs)) if bias else None)


class NoHead(nn.Module):
    """No head: the outputs of the model are the head's inputs. ``weight`` is the identity, for a `Readout`."""

    bias = None
    weight: Tensor

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("weight", torch.eye(width), persistent=False)

    def forward(self, hidden_BND: Tensor) -> Tensor:
        return hidden_BND


class Backbone(OwnInit):
    """Tokens (B, N) → logits (B, N, V): embedding, blocks, final norm, linear head.

    Positions enter inside the mixers (RoPE) or with the embedding.

    With cross branches in the blocks, context tokens (B, J) use the same embedding and are normed once. Every block
    reads the same context, on the scale of the normed source.

    Inputs and mask (B, S, N) are B groups of S sequences, e.g. the sentences of a pair; the results are (B, S, V), one
    pooled row per sequence.

    Args:
        embedding: module from inputs to (B, N, D): an `nn.Embedding` of tokens, patches of images.
        num_outputs: V; None: no head, the outputs are the pooled states themselves.
        width: D.
        blocks: the blocks.
        final_norm: norm before the head.
        context_norm: norm of the context; None without cross branches.
        condition: shape of a condition made from a noise level (B,). It modulates the blocks (built for it) and the
            final norm; the head starts at zero. None: no noise level.
        pool: ``pool(hidden_BND, mask_BN)`` → (B, M, D), the head's input; the logits are then (B, M, V). None: every
            position.
        head: shape of the head.
        loops: number of passes of the state through all blocks, with the same weights.
        dropout: share of the first block's input dropped in training mode, after embedding and positions (as in
            nanoGPT). A context is read whole.
        convolution: maps the embedding (B, N, D) and its mask, before dropout; None: nothing does.

    Attributes:
        gives_losses: whether `forward` supports ``losses``.
        factors: a parametrization's factors by parameter; none: all are 1.
        readout_scale: factor on the head's input.
        logit_softcap: bound c of the logits, which are then c·tanh(z/c); None: none. A ``readout`` uses `cap`.
    """

    # roles of the parts built here (`stability.config.groups`), unless a part defines other roles inside
    own_roles: ClassVar = {
        "embedding": "embedding",
        "convolution": "embedding",
        "final_norm": "norm",
        "context_norm": "norm",
        "head": "head",
        "noise_level": "condition",
        "final_modulation": "condition",
    }
    gives_losses: ClassVar[bool] = True
    factors: Mapping[str, Factors] = MappingProxyType({})
    readout_scale: float = 1.0
    logit_softcap: float | None = None

    def __init__(
        self,
        embedding: nn.Module,
        num_outputs: int | None,
        width: int,
        blocks: list[Block],
        final_norm: nn.Module,
        context_norm: nn.Module | None = None,
        condition: ConditionShape | None = None,
        pool: Pool | None = None,
        head: HeadShape = HeadShape(),
        loops: int = 1,
        dropout: float = 0.0,
        convolution: nn.Module | None = None,
    ):
        super().__init__()
        self.embedding, self.pool, self.tied_to = embedding, pool, head.tied_to
        self.dropout, self.convolution = nn.Dropout(dropout), convolution
        self.blocks, self.loops = nn.ModuleList(blocks), loops
        hold_once(self.blocks)
        self.final_norm = final_norm
        if num_outputs is None:
            self.head = NoHead(width)
        else:
            tied = head.tied_to is not None
            self.head = TiedHead(num_outputs, head.bias) if tied else nn.Linear(width, num_outputs, head.bias)
        self.context_norm = context_norm
        self.noise_level = None if condition is None else NoiseLevel(condition)
        self.final_modulation = None if condition is None else FinalModulation(condition.width, width)
        # with modulations of zero, an untrained model predicts log s = −log(e^σ − 1) − log V, equal for all tokens
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
        """Return the logits (B, N, V), or the result of ``readout``.

        Args:
            tokens_BN: inputs of the embedding.
            mask_BN: True for a valid token; None: all. With three axes, tokens have them, too.
            context_BJ: context tokens, required if and only if there are cross branches.
            context_mask_BJ: True for a valid context token; None: all.
            sigma_B: noise level of each sequence, required if and only if the model is conditioned.
            readout: ``readout(hidden_BND, weight_VD, bias_V)`` with the head's input and parameters (bias None without
                one). Its result replaces the logits, e.g. for a loss that never computes them all.
            losses: whether to return `WithLoss`, the result with the sum of the blocks' own losses, if any has one.
            **inputs: further inputs of mixers, e.g. ``edges=`` for ``sc`` with ``graph=given``.

        Raises:
            ValueError: a context or noise level is missing or unused, or no mixer has an input of this name.
        """
        context, condition_BC = self._context(context_BJ, context_mask_BJ), self._condition(sigma_B)
        if inputs:
            self._check(inputs)
        groups = None
        if mask_BN is not None and mask_BN.ndim == 3:
            groups = mask_BN.shape[:2]
            tokens_BN, mask_BN = tokens_BN.flatten(0, 1), mask_BN.flatten(0, 1)
        residual: Any = cast(Block, self.blocks[0]).mixer_residual
        state, own = residual.enter(self.dropout(self._embed(tokens_BN, mask_BN))), []
        for block in self.list_passes():
            state = split_loss(block(state, mask_BN, context, inputs, condition_BC), own)
        hidden_BND = residual.leave(state, self.final_norm)
        if self.final_modulation is not None:
            hidden_BND = self.final_modulation(hidden_BND, condition_BC)
        if self.pool is not None:
            hidden_BND = self.pool(hidden_BND, mask_BN)
        if groups is not None:
            hidden_BND = hidden_BND.squeeze(1).unflatten(0, groups)
            own = [loss.unflatten(0, groups).mean(1) for loss in own]
        if self.readout_scale != 1:
            hidden_BND = self.readout_scale * hidden_BND
        result = self._read_out(hidden_BND, readout)
        return attach_losses(result, own) if losses else result

    def _embed(self, tokens_BN: Any, mask_BN: Tensor | None) -> Tensor:
        x_BND = self.embedding(tokens_BN)
        return at_least_float32(x_BND if self.convolution is None else self.convolution(x_BND, mask_BN))

    def _read_out(self, hidden_BND: Tensor, readout: Readout | None) -> Any:
        if readout is not None:
            return readout(hidden_BND, self._head_weight(), self.head.bias)
        if isinstance(self.head, TiedHead):
            logits_BNV = nn.functional.linear(hidden_BND, self._head_weight(), self.head.bias)
        else:
            logits_BNV = self.head(hidden_BND)
        return self.cap(logits_BNV)

    def cap(self, logits: Tensor) -> Tensor:
        """Return logits of any shape, bounded by ``logit_softcap``."""
        if self.logit_softcap is None:
            return logits
        return self.logit_softcap * torch.tanh(at_least_float32(logits) / self.logit_softcap)

    def list_passes(self) -> list[Block]:
        """Return the blocks in the state's order: all of them, ``loops`` times."""
        return cast(list[Block], [*self.blocks]) * self.loops

    def _head_weight(self) -> Tensor:
        """Return the head's weight (V, D); if tied, the embedding's first V rows."""
        if not isinstance(self.head, TiedHead):
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
        return Context(self.context_norm(self._embed(context_BJ, context_mask_BJ)), context_mask_BJ)

    def _check(self, inputs: dict[str, Any]) -> None:
        taken = frozenset().union(*(cast(Block, block).mixer_inputs for block in self.blocks))
        if unread := sorted(set(inputs) - taken):
            raise ValueError(
                f"{unread[0]}=: no mixer of this model takes it (edges= belongs to mechanism=sc with graph=given)"
            )


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def num_active_parameters(model: nn.Module) -> int:
    """Return the number of parameters that a position meets: without the experts that a router leaves out."""
    return num_parameters(model) - sum(getattr(module, "num_idle", 0) for module in model.modules())


def block_of(name: str) -> str:
    """Return the block's name of a model's parameter.

    "blocks.0.mixer" (ffn, mixer_norm, …) inside a layer, else the module's name.
    """
    parts = name.split(".")
    return ".".join(parts[:3] if parts[0] == "blocks" else parts[:1])
