"""The contract of every mechanism, as plain functions that raise AssertionError: the faults in `faults.py` prove that
each of them bites."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from stability.curvature import directional
from stability.linears import drop_biases
from stability.mechanisms import build
from stability.mechanisms._attention import AbstractSoftmaxAttention
from stability.mechanisms._observed import AbstractAttention, AbstractConsensus
from stability.models.init import OwnInit, initialise
from stability.optimizers import parameter_groups
from tests.mechanisms.oracles import block_operator
from tests.mechanisms.sight_checks import (
    BATCH,
    HEADS,
    LENGTHS,
    NUM_POSITIONS,
    WIDTH,
    check_both_sides_are_seen,
    check_future_is_unseen,
    check_padding_is_unread,
    check_past_is_seen,
    check_wholly_padded_is_finite,
    inputs,
    padding,
    scattered_padding,
)
from tests.within import assert_within

__all__ = [
    "BATCH",
    "HEADS",
    "LENGTHS",
    "NUM_POSITIONS",
    "WIDTH",
    "check_both_sides_are_seen",
    "check_future_is_unseen",
    "check_padding_is_unread",
    "check_past_is_seen",
    "check_wholly_padded_is_finite",
    "inputs",
    "padding",
]


MARGIN = 1e-3  # central differences move a score by 1e-4 or less
Build = Callable[[], Any]


def build_seeded(build: Build, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def moved(name: str, direction: str = "causal", **settings: Any) -> Any:
    """Return a layer in float64 none of whose parameters is where it begins: scales of 1 and biases of 0 hide mistakes."""
    shape = {"width": WIDTH, "heads": HEADS, "direction": direction, "layer": 1, "num_layers": 2}
    layer = build_seeded(lambda: build(name, **shape, **settings)).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for value in layer.parameters():
            value.add_(0.3 * torch.randn(value.shape, dtype=value.dtype, generator=generator))
    return layer


def check_taylor_is_double_backward(
    module: nn.Module, x_BND: Tensor, mask_BN: Tensor | None = None, *given: Tensor
) -> None:
    """Slope and curvature along a random direction, by Taylor terms and by double backward; of valid positions.

    Args:
        module: in float64.
        x_BND: inputs in float64.
        mask_BN: True at valid positions; None: all are.
        given: further arguments of the module, such as a context.
    """
    params = {name: value.detach() for name, value in module.named_parameters()}
    generator = torch.Generator().manual_seed(3)
    along = {name: torch.randn(value.shape, dtype=value.dtype, generator=generator) for name, value in params.items()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        y_BND = functional_call(module, values, (x_BND, *given), {"mask_BN": mask_BN})
        return y_BND.tanh()[slice(None) if mask_BN is None else mask_BN].square().sum()

    one, two = (directional(loss, params, along, method=method) for method in ("taylor", "double_backward"))
    assert one.slope == pytest.approx(two.slope, rel=1e-10)
    assert one.curvature == pytest.approx(two.curvature, rel=1e-9)


def check_equals_loop(layer: nn.Module, loop: Callable[[Tensor, list[bool]], Any], num_positions: int) -> None:
    """Compare a layer's valid outputs with a slow loop, sequence by sequence, without padding and with it scattered.

    Args:
        layer: in float64.
        loop: makes of one sequence's inputs (N, D) and valid positions the outputs, (N, D) or by position.
        num_positions: N.
    """
    x_BND = inputs(num_positions=num_positions)
    with torch.no_grad():
        for mask_BN in (None, scattered_padding(num_positions)):
            valid_BN = torch.ones(BATCH, num_positions, dtype=torch.bool) if mask_BN is None else mask_BN
            found = layer(x_BND, mask_BN=mask_BN)
            for b, valid_N in enumerate(valid_BN):
                outputs = loop(x_BND[b], valid_N.tolist())
                for t in valid_N.nonzero().flatten().tolist():
                    torch.testing.assert_close(found[b, t], outputs[t], rtol=1e-10, atol=1e-12)


def check_shape_and_dtype(module: nn.Module) -> None:
    for dtype in (torch.float32, torch.float64):
        for num_positions in (1, 2, 17, 40):
            x_BND = inputs(dtype, num_positions)
            y_BND = module.to(dtype)(x_BND)
            assert y_BND.shape == x_BND.shape, f"{tuple(x_BND.shape)} in, {tuple(y_BND.shape)} out"
            assert y_BND.dtype == dtype, f"{dtype} in, {y_BND.dtype} out"
            assert y_BND.isfinite().all()


def check_every_parameter_is_trained(module: nn.Module) -> None:
    """Each parameter has a gradient in a sequence of 40, wherever training may have brought the parameters: a scorer
    whose choice is all that counts has none."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for value in module.double().parameters():
            value.add_(0.1 * torch.randn(value.shape, dtype=value.dtype, generator=generator))
    names, leaves = zip(*module.named_parameters(), strict=True)
    y_BND = module(inputs(num_positions=LENGTHS[-1]))
    gradients = torch.autograd.grad(y_BND.square().sum(), leaves, allow_unused=True)
    untrained = [
        name for name, gradient in zip(names, gradients, strict=True) if gradient is None or not gradient.any()
    ]
    assert not untrained, f"{', '.join(untrained)}: no gradient"


def check_own_decay(module: nn.Module, expected: Mapping[str, bool]) -> None:
    """What a mechanism says of weight decay (`own_decay`, its inner modules' too) is what is written down for it, of
    parameters that it has."""
    told = {
        f"{name}.{key}".strip("."): decayed
        for name, part in module.named_modules()
        for key, decayed in getattr(part, "own_decay", {}).items()
    }
    assert told == dict(expected), f"own_decay says {told}; written down is {dict(expected)}"
    strangers = sorted(set(told) - {name for name, _ in module.named_parameters()})
    assert not strangers, f"own_decay names {', '.join(strangers)}, which the mechanism does not have"


def check_deterministic(build: Build) -> None:
    first, second = build_seeded(build).double(), build_seeded(build).double()
    assert torch.equal(first(inputs()), second(inputs())), "two modules of one seed differ"
    assert torch.equal(first(inputs()), first(inputs())), "two calls differ"


def check_save_load(build: Build) -> None:
    first, second = build_seeded(build, 0).double(), build_seeded(build, 1).double()
    assert not torch.equal(first(inputs()), second(inputs())), "two seeds give the same outputs"
    second.load_state_dict(first.state_dict(), strict=True)
    assert torch.equal(first(inputs()), second(inputs())), "the state dict does not hold the module"


def check_own_init_stays(build: Build) -> None:
    """What a mechanism says it starts itself is as its constructor left it after the whole model's initialisation."""
    mixer = build_seeded(build)
    claimed = {
        f"{name}.{key}".strip("."): module.get_parameter(key)
        for name, module in mixer.named_modules()
        if isinstance(module, OwnInit)
        for key in module.own_init
    }
    before = {name: value.detach().clone() for name, value in claimed.items()}
    initialise(nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"mixer": mixer})])}), 4, 0.5)
    mixer.start_local(2.0)
    changed = [name for name, value in claimed.items() if not torch.equal(value, before[name])]
    assert not changed, f"{', '.join(changed)}: not as the constructor left them"


def check_biases_may_go(build: Build) -> None:
    """`model.mixer_bias`: without the biases of its linear maps a mechanism does what it does with biases of zero."""
    for kept in ("out", "none"):
        zero, without = build_seeded(build).double(), build_seeded(build).double()
        drop_biases(without, kept)
        left = dict(without.named_parameters())
        with torch.no_grad():
            for name, value in zero.named_parameters():
                if name not in left:
                    value.zero_()
        assert kept == "out" or len(left) < len(list(zero.parameters())), "no linear map has a bias to lose"
        assert parameter_groups(without, lambda param: True), "an optimizer finds what is left"
        assert torch.allclose(zero(inputs()), without(inputs()), rtol=0, atol=1e-13), (
            f"mixer_bias={kept}: another output"
        )


def check_second_derivatives(module: nn.Module) -> None:
    """A float64 HVP by double backward against central differences of gradients, and against forward mode over the
    gradient; of a mechanism that selects, away from where its selection changes."""
    module = module.double()
    if getattr(module, "piecewise_smooth", False):
        with torch.no_grad():
            margin = float(module.margin(inputs(), mask_BN=padding()))
        assert margin > MARGIN, f"the scores are {margin:.1e} from another selection: take another seed"
    params = {name: value.detach() for name, value in module.named_parameters()}
    generator = torch.Generator().manual_seed(3)
    direction = {
        name: torch.randn(value.shape, dtype=value.dtype, generator=generator) for name, value in params.items()
    }
    weight_BND = torch.randn(inputs().shape, dtype=torch.float64, generator=generator)

    def loss(values: dict[str, Tensor]) -> Tensor:
        y_BND = functional_call(module, values, (inputs(),), {"mask_BN": padding()})
        return (weight_BND * torch.tanh(y_BND))[padding()].sum()

    with sdpa_kernel(SDPBackend.MATH):
        product = _double_backward(loss, params, direction)
        _assert_close(
            product,
            _central_difference(loss, params, direction),
            1e-6,
            "double backward disagrees with central differences",
        )
        _assert_close(
            product, jvp(grad(loss), (params,), (direction,))[1], 1e-10, "jvp of grad disagrees with double backward"
        )


def check_degenerate_inputs(module: nn.Module) -> None:
    """Finite second derivatives in float32 where every position holds the same, and where all hold zero."""
    for x_BND in (torch.zeros(2, 4, WIDTH), torch.ones(2, 4, WIDTH)):
        x_BND.requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            leaves = (x_BND, *module.float().parameters())
            gradients = torch.autograd.grad(module(x_BND).square().sum(), leaves, create_graph=True)
            second = torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), leaves)
        assert all(tensor.isfinite().all() for tensor in (*gradients, *second)), (
            "a derivative at a constant signal is not finite"
        )


def _double_backward(loss: Callable, params: dict[str, Tensor], direction: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    gradients = torch.autograd.grad(loss(leaves), list(leaves.values()), create_graph=True)
    along = sum((gradient * direction[name]).sum() for name, gradient in zip(leaves, gradients, strict=True))
    return dict(zip(leaves, torch.autograd.grad(along, list(leaves.values()), materialize_grads=True), strict=True))


def _central_difference(
    loss: Callable, params: dict[str, Tensor], direction: dict[str, Tensor], step: float = 1e-6
) -> dict[str, Tensor]:
    ahead, behind = (
        grad(loss)({name: value + sign * step * direction[name] for name, value in params.items()}) for sign in (1, -1)
    )
    return {name: (ahead[name] - behind[name]) / (2 * step) for name in params}


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, message: str) -> None:
    error = torch.stack([(found[name] - expected[name]).norm() for name in found]).norm()
    scale = torch.stack([expected[name].norm() for name in found]).norm()
    assert scale > 0, "the curvature along the direction is exactly zero"
    assert_within(error, tolerance * scale, f"{message}: relative error {error / scale:.1e}")


def check_weights_reproduce_forward(module: AbstractAttention) -> None:
    """The exposed weights on the exposed values give the layer's output, where a position is valid; rows sum to 1 or 0
    where the class says so."""
    x_BND = inputs()
    for mask_BN in (None, padding()):
        valid_BN = torch.ones(x_BND.shape[:2], dtype=torch.bool) if mask_BN is None else mask_BN
        y_BND, a_BHNN = module.double()(x_BND, mask_BN=mask_BN), module.weights(x_BND, mask_BN=mask_BN)
        maps = HEADS * module.maps_per_head
        assert a_BHNN.shape == (BATCH, maps, NUM_POSITIONS, NUM_POSITIONS), f"weights of shape {tuple(a_BHNN.shape)}"
        rebuilt_BND = module.joined(module.mixed(a_BHNN, module.values(x_BND)), x_BND)
        assert torch.allclose(rebuilt_BND[valid_BN], y_BND[valid_BN], rtol=1e-10, atol=1e-12), "another output"
        to_padding_BHNN = a_BHNN * ~valid_BN[:, None, None]
        assert not to_padding_BHNN.movedim(1, 2)[valid_BN].any(), "padding has a weight"
        if module.rows_sum_to_one:
            rows_RHN = a_BHNN.movedim(1, 2)[valid_BN]
            is_one_RH = (rows_RHN.sum(-1) - 1).abs() < 1e-12
            assert (is_one_RH | (rows_RHN == 0).all(-1)).all(), "a row does not sum to 1"


def check_softmax_is_as_declared(module: AbstractSoftmaxAttention) -> None:
    """What a softmax attention says of itself, and probes read beside its weights, is what it computes: queries, keys,
    values, logits, pairs that see each other, W_q and W_k, a masked diagonal, γ."""
    x_BND, module = inputs(), module.double()
    with torch.no_grad():
        for mask_BN in (None, padding()):
            given_BND = x_BND if mask_BN is None else x_BND.where(mask_BN[..., None], 0.0)
            q_BHNK, k_BHNK, v_BHNK = module.split(module.qkv(given_BND))
            seen = module.visible(NUM_POSITIONS, x_BND.device)
            if mask_BN is not None:
                seen = seen & mask_BN[:, None, None]
            part_BHNN = module.logits(q_BHNK, k_BHNK).exp() * seen
            expected_BHNN = part_BHNN / part_BHNN.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
            a_BHNN = module.weights(x_BND, mask_BN=mask_BN)
            assert torch.allclose(a_BHNN, expected_BHNN, rtol=1e-10, atol=1e-14), "weights of other logits or pairs"
            assert torch.allclose(module.values(given_BND), v_BHNK, rtol=1e-12, atol=1e-14), "other values"
        a_BHNN, v_BHNK = module.weights(x_BND), module.values(x_BND)
        diagonal_BHN, visible = a_BHNN.diagonal(dim1=-2, dim2=-1), module.visible(NUM_POSITIONS, x_BND.device)
        # heads that see different pairs may each leave some positions out of their own sight
        sees_itself = visible.diagonal(dim1=-2, dim2=-1) if visible.ndim == 3 else not module.mask_diagonal
        assert ((diagonal_BHN > 0) == sees_itself).all(), f"mask_diagonal={module.mask_diagonal}: not so"
        passed_on_BHNK = torch.einsum("bhij,bhjk->bhik", a_BHNN, v_BHNK)
        if module.gamma is not None:
            passed_on_BHNK = v_BHNK - float(module.gamma) * passed_on_BHNK
        assert torch.allclose(module.mixed(a_BHNN, v_BHNK), passed_on_BHNK, rtol=1e-12, atol=1e-13), (
            f"gamma={module.gamma}: the heads pass on something else"
        )
        _check_projections(module, x_BND)


def _check_projections(module: AbstractSoftmaxAttention, x_BND: Tensor) -> None:
    """Without rotation and biases the logits are the factor times (W_q x)·(W_k x′), by the exposed W_q and W_k, each normed
    first with ``qk_norm``."""
    plain = copy.deepcopy(module)
    plain.rope = None
    if plain.qkv.bias is not None:
        nn.init.zeros_(plain.qkv.bias)
    found_BHNN = plain.logits(*plain.split(plain.qkv(x_BND))[:2])
    w_q_HKD, w_k_HKD = module.projections()
    q_BHNK, k_BHNK = (torch.einsum("bid,hkd->bhik", x_BND, w_HKD) for w_HKD in (w_q_HKD, w_k_HKD))
    if not module.is_bilinear:
        q_BHNK, k_BHNK = module.q_norm(q_BHNK), module.k_norm(k_BHNK)
    learned = module.log_temperature
    factor = 1 / math.sqrt(WIDTH // HEADS) if learned is None else math.exp(learned.item())
    expected_BHNN = factor * torch.einsum("bhik,bhjk->bhij", q_BHNK, k_BHNK)
    if module.softcap is not None:
        expected_BHNN = module.softcap * (expected_BHNN / module.softcap).tanh()
    assert torch.allclose(found_BHNN, expected_BHNN, rtol=1e-10, atol=1e-12), (
        "logits of other projections or of another factor"
    )


def check_edges_reproduce_forward(module: AbstractConsensus, **given: Tensor) -> None:
    """The exposed edges, step sizes and rotation give the layer's output, by dense matrices a sequence and head."""
    x_BND = inputs()
    y_BND = module.double()(x_BND, **given)
    u_BND, width = module.source(x_BND).detach().clone(), WIDTH // HEADS
    for b in range(BATCH):
        source_E, target_E, r_BHEKK = module.edge_weights(x_BND[b : b + 1], **given)
        edges = list(zip(source_E.tolist(), target_E.tolist(), strict=True))
        for head in range(module.heads):
            part = slice(head * width, (head + 1) * width)
            weights = dict(zip(edges, r_BHEKK[0, head].detach(), strict=True))
            operator = block_operator(weights, NUM_POSITIONS, width, module.rotation)
            for step_size in module.step_sizes():
                gradient_M = operator @ u_BND[b, :, part].flatten()
                u_BND[b, :, part] -= float(step_size) * gradient_M.unflatten(0, (-1, width))
    assert torch.allclose(module.out(u_BND), y_BND, rtol=1e-10, atol=1e-12), "another output"
