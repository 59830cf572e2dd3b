"""`moe`: a mixture of experts of which a router picks a few (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from stability.config import Settings
from stability.ffns import AbstractFeedForward
from stability.ffns.glu import GatedLinearUnit
from stability.ffns.mlp import MultilayerPerceptron
from stability.models.block import WithLoss
from stability.models.passes import at_least_float32, in_float32

EXPERTS: dict[str, type[AbstractFeedForward]] = {"glu": GatedLinearUnit, "mlp": MultilayerPerceptron}
MOST_DENSE = 1_000_000  # weights of all experts up to which each of them maps every position


class Router(nn.Linear):
    """Logits of the experts, (…, D) → (…, E), in float32 or wider also in a bfloat16 run.

    Rounded logits would change the choice. An optimizer of matrices gives its weight to AdamW, as it does a table's.
    """

    is_table: ClassVar[bool] = True

    def forward(self, input: Tensor) -> Tensor:
        with in_float32(input.device):
            return F.linear(at_least_float32(input), at_least_float32(self.weight))


class MixtureOfExperts(AbstractFeedForward):
    """Mixture of experts, y = Σ_i w_i FFN_i(x) + Σ_s FFN_s(x), over the k experts i of the largest p and all shared s.

    p = softmax(W_r x) over all E experts; w_i = p_i (Switch, OLMoE), or p_i over the sum of the chosen ones (Mixtral).
    No expert has a capacity, and no position is dropped. Up to `MOST_DENSE` weights each expert maps every position,
    which is the same function; above, each maps its own.

    The loss of a sequence of T valid positions is balance·Σ_i f_i P_i + z_loss·mean_t (log Σ_i exp r_ti)², with
    f_i = E/(kT)·#{t: i is chosen} and P_i = mean_t p_ti: the balance of a sequence in DeepSeek-V3 (arXiv:2412.19437)
    and the router's z-loss of ST-MoE (arXiv:2202.08906). At equal load the first term is ``balance``.

    The function is smooth between two changes of the choice; its derivatives are the current piece's.
    """

    has_loss = True
    piecewise_smooth = True

    class Config(Settings):
        """Settings of the experts, their router and its losses."""

        experts: int = Field(default=8, ge=1, le=4096, description="number E of experts")
        top_k: int = Field(default=2, ge=1, description="experts k of a position, those of the largest p")
        normalise: bool = Field(
            default=True, description="whether the chosen experts' weights are divided by their sum (Mixtral), or not"
        )
        expert: Literal["glu", "mlp"] = Field(default="glu", description="feed-forward network of each expert")
        multiple: float | None = Field(
            default=None,
            gt=0,
            le=1024,
            description="hidden width of an expert as a multiple of d; null: that of ffn=glu or mlp over top_k + "
            "shared, for as many active weights",
        )
        shared: int = Field(default=0, ge=0, le=4096, description="further experts, which map every position")
        balance: float = Field(default=0.01, ge=0, description="weight of the loss that balances the load; 0: none")
        z_loss: float = Field(default=0.001, ge=0, description="weight of the squared log Z of the router; 0: none")

        @model_validator(mode="after")
        def _check_choice(self) -> MixtureOfExperts.Config:
            if self.top_k > self.experts:
                raise ValueError(
                    f"ffn.top_k={self.top_k} chooses among ffn.experts={self.experts}; give at most as many"
                )
            if self.normalise and self.top_k == 1 < self.experts:
                raise ValueError(
                    "ffn.top_k=1 makes every weight 1 where ffn.normalise=true, and no router learns; add "
                    "ffn.normalise=false"
                )
            return self

    def __init__(self, config: Config, width: int, multiple: float):
        super().__init__()
        kind, self.config = EXPERTS[config.expert], config
        settings = kind.Config.model_validate({"multiple": config.multiple})
        own = multiple / (config.top_k + config.shared)
        self.experts = nn.ModuleList(kind.build(settings, width, own) for _ in range(config.experts))
        self.shared = nn.ModuleList(kind.build(settings, width, own) for _ in range(config.shared))
        self.router = Router(width, config.experts, bias=False)
        of_experts = sum(each.numel() for each in self.experts.parameters())
        self.is_dense = of_experts <= MOST_DENSE
        self.num_idle = of_experts // config.experts * (config.experts - config.top_k)

    def margin(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        """Return the smallest gap of a valid position between its last chosen logit and the next one; inf if none."""
        top_k = self.config.top_k
        if top_k == self.config.experts:
            return x_BND.new_full((), math.inf)
        best_BNK = self.router(x_BND).topk(top_k + 1, -1).values
        gap_BN = best_BNK[..., top_k - 1] - best_BNK[..., top_k]
        return (gap_BN if mask_BN is None else gap_BN.masked_fill(~mask_BN, math.inf)).amin()

    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> WithLoss:
        r_BNE = self.router(x_BND)
        p_BNE, chosen_BNE = r_BNE.softmax(-1), self.choose(r_BNE)
        w_BNE = p_BNE * chosen_BNE
        if self.config.normalise:
            w_BNE = w_BNE / w_BNE.sum(-1, keepdim=True)
        is_dense = self.is_dense or torch.compiler.is_compiling()  # whose graphs have no shapes that depend on values
        y_BND = (self._map_all if is_dense else self._map_own)(x_BND, w_BNE, chosen_BNE)
        for expert in self.shared:
            y_BND = y_BND + expert(x_BND)
        return WithLoss(y_BND, self._loss(r_BNE, p_BNE, chosen_BNE, mask_BN))

    def choose(self, r_BNE: Tensor) -> Tensor:
        """Return 1 at each position's k experts of the largest logits, else 0."""
        return torch.zeros_like(r_BNE).scatter(-1, r_BNE.topk(self.config.top_k, -1).indices, 1.0)

    def describe_routing(self, r_PE: Tensor) -> dict[str, Tensor]:
        """Return statistics of the choice at P positions.

        The load of the busiest expert over the mean, the number of experts without a position, and the mean entropy of
        p in nats.
        """
        load_E, log_p_PE = self.choose(r_PE).mean(0), r_PE.log_softmax(-1)
        return {
            "expert_load_max": load_E.amax() * (self.config.experts / self.config.top_k),
            "dead_experts": (load_E == 0).sum(),
            "router_entropy": -(log_p_PE.exp() * log_p_PE).sum(-1).mean(),
        }

    def _map_all(self, x_BND: Tensor, w_BNE: Tensor, chosen_BNE: Tensor) -> Tensor:
        """Return the mixture, every position mapped by each expert."""
        of_experts = [expert(x_BND) for expert in self.experts]
        y_BND = w_BNE[..., :1] * of_experts[0]
        for index, each_BND in enumerate(of_experts[1:], 1):
            y_BND = y_BND + w_BNE[..., index, None] * each_BND
        return y_BND.to(of_experts[0].dtype)

    def _map_own(self, x_BND: Tensor, w_BNE: Tensor, chosen_BNE: Tensor) -> Tensor:
        """Return the mixture, each position mapped by its own experts: R = k·positions rows, sorted by expert."""
        top_k, (x_PD, w_PE) = self.config.top_k, (each.flatten(0, -2) for each in (x_BND, w_BNE))
        chosen_PK = chosen_BNE.flatten(0, -2).topk(top_k, -1).indices
        order_R = chosen_PK.flatten().argsort(stable=True)
        num = len(self.experts)
        # on the meta device there are no values: as at equal load
        counts = [len(order_R) // num + (index < len(order_R) % num) for index in range(num)]
        if not x_BND.is_meta:
            counts = chosen_PK.flatten().bincount(minlength=num).tolist()
        parts = x_PD[order_R // top_k].split(counts)
        y_RD = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        # by the inverse order rather than by a sum into places, whose order of addition varies on CUDA
        y_PKD = y_RD[order_R.argsort()].unflatten(0, (-1, top_k))
        y_PD = (w_PE.gather(-1, chosen_PK)[..., None] * y_PKD).sum(1)
        return y_PD.to(y_RD.dtype).unflatten(0, x_BND.shape[:-1])

    def _loss(self, r_BNE: Tensor, p_BNE: Tensor, chosen_BNE: Tensor, mask_BN: Tensor | None) -> Tensor:
        """Return the loss of each sequence, (B)."""
        f_BE, share_BE = (average_valid(each, mask_BN) for each in (chosen_BNE, p_BNE))
        balance_B = (f_BE * share_BE).sum(-1) * (self.config.experts / self.config.top_k)
        z_B = average_valid(r_BNE.logsumexp(-1, keepdim=True).square(), mask_BN).squeeze(-1)
        return self.config.balance * balance_B + self.config.z_loss * z_B


def average_valid(x_BNE: Tensor, mask_BN: Tensor | None) -> Tensor:
    """Return the mean over valid positions, (B, E); 0 for a sequence without one."""
    if mask_BN is None:
        return x_BNE.mean(1)
    return x_BNE.masked_fill(~mask_BN[..., None], 0.0).sum(1) / mask_BN.sum(1).clamp(min=1)[:, None]


EXPORT = MixtureOfExperts
