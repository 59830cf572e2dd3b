"""``impl=fla``: what is handed to flash-linear-attention's kernels, with its slow references in their places, and what
is refused. The kernels themselves need a GPU."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kernels import recurrences
from stability.config.parts import kernels_of, part
from stability.curvature._graph import NoSecondDerivative, name_refusals
from stability.mechanisms import build
from stability.training.machine import require_kernels
from tests.mechanisms.checks import build_seeded
from tests.mechanisms.decay_loops import before_norm
from tests.mechanisms.fla_naive import fla_naive
from tests.within import assert_within

FLA = {"mechanism": part("mechanisms", {"name": "gla", "impl": "fla"})}
BATCH, HEADS, NUM, KEYS, VALUES = 2, 3, 7, 4, 5
NAIVE = {
    "chunk_gla": ("gla", "naive_recurrent_gla", {"g": "gk"}),
    "chunk_simple_gla": ("simple_gla", "naive_recurrent_simple_gla", {}),
    "chunk_delta_rule": ("delta_rule", "delta_rule_recurrence", {}),
    "chunk_gated_delta_rule": ("gated_delta_rule", "naive_recurrent_gated_delta_rule", {}),
    "chunk_kda": ("kda", "naive_recurrent_kda", {}),
}
HEADS_FIRST, WITHOUT_SCALE = ("chunk_delta_rule",), ("chunk_delta_rule", "chunk_gla")


def stand_in(calls):
    """Return what gives fla's slow reference in the place of each kernel, in the kernel's own layout."""

    def kernel(op, name):
        folder, function, renamed = NAIVE[name]
        assert folder == op

        def run(*, scale, **parts):
            calls.append(name)
            assert scale == 1.0 and all(part.is_contiguous() for part in parts.values())
            assert {parts[key].dtype for key in ("q", "k", "v")} == {torch.bfloat16}
            assert {part.dtype for key, part in parts.items() if key not in ("q", "k", "v")} == {torch.float32}
            assert all(part.shape[:3] == (BATCH, NUM, HEADS) for part in parts.values()), "(B, N, H, …)"
            given = {renamed.get(key, key): part.float() for key, part in parts.items()}
            given |= {"q": given["q"] * KEYS**0.5} if name in WITHOUT_SCALE else {"scale": scale}
            if name in HEADS_FIRST:
                given = {key: part.transpose(1, 2) for key, part in given.items()}
            y, state = getattr(fla_naive(folder), function)(**given)
            return (y.transpose(1, 2) if name in HEADS_FIRST else y), state

        return run

    return kernel


def drawn(decay_width, *, shared=False):
    """q, k, v that bfloat16 holds exactly, β and ln a, (B, H, N, …) in float64; ``shared``: q, k, ln a of one head."""
    generator = torch.Generator().manual_seed(3)

    def normal(heads, width):
        x = torch.randn(BATCH, heads, NUM, width, generator=generator).bfloat16().double()
        return x.requires_grad_()

    heads = 1 if shared else HEADS
    q, k, v = normal(heads, KEYS), normal(heads, KEYS), normal(HEADS, VALUES)
    beta = torch.rand(BATCH, HEADS, NUM, generator=generator).double().requires_grad_()
    log_decay = -torch.rand(BATCH, heads, NUM, max(decay_width, 1), generator=generator).double()
    return q, k, v, beta, log_decay.requires_grad_()


def by_loop(q, k, v, log_decay, beta=None):
    """The recurrence as it is written, a position at a time in float64; with β the delta rule."""
    state, found = v.new_zeros(BATCH, HEADS, KEYS, VALUES), []
    for t in range(NUM):
        state = state if log_decay is None else state * log_decay[:, :, t, :, None].exp()
        write = v[:, :, t]
        if beta is not None:
            write = beta[:, :, t, None] * (write - (k[:, :, t, :, None] * state).sum(-2))
        state = state + k[:, :, t, :, None] * write[:, :, None]
        found.append((q[:, :, t, :, None] * state).sum(-2))
    return torch.stack(found, 2)


@pytest.mark.parametrize(
    ("rule", "decay_width", "kernel"),
    [
        ("gated_linear_attention", KEYS, "chunk_gla"),
        ("gated_linear_attention", 1, "chunk_simple_gla"),
        ("delta_rule", 0, "chunk_delta_rule"),
        ("delta_rule", 1, "chunk_gated_delta_rule"),
        ("delta_rule", KEYS, "chunk_kda"),
    ],
)
def test_each_kernel_is_handed_what_the_recurrence_says(monkeypatch, rule, decay_width, kernel):
    calls = []
    monkeypatch.setattr(recurrences, "_kernel", stand_in(calls))
    q, k, v, beta, log_decay = drawn(decay_width)
    given = [q, k, v, *([beta] if rule == "delta_rule" else []), *([log_decay] if decay_width else [])]
    expected = by_loop(q, k, v, log_decay if decay_width else None, beta if rule == "delta_rule" else None)
    found = getattr(recurrences, rule)(*given)
    assert calls == [kernel] and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
    ours = torch.autograd.grad((found * weight).sum(), given)
    for mine, theirs in zip(ours, torch.autograd.grad((expected * weight).sum(), given), strict=True):
        assert mine.dtype == torch.float64
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-2 * float(theirs.abs().max()))  # through bfloat16


def test_what_heads_share_is_written_out_for_each_of_them(monkeypatch):
    monkeypatch.setattr(recurrences, "_kernel", stand_in([]))
    q, k, v, _, log_decay = drawn(1, shared=True)
    found = recurrences.gated_linear_attention(q, k, v, log_decay)
    torch.testing.assert_close(found.double(), by_loop(q, k, v, log_decay), rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad(found.sum(), (q, log_decay))
    assert [gradient.shape for gradient in gradients] == [q.shape, log_decay.shape]


def test_a_second_derivative_is_refused_and_not_silently_wrong(monkeypatch):
    monkeypatch.setattr(recurrences, "_kernel", stand_in([]))
    q, k, v, beta, log_decay = drawn(1)
    for found in (
        recurrences.gated_linear_attention(q, k, v, log_decay),
        recurrences.delta_rule(q, k, v, beta, log_decay),
    ):
        for loss in (found.sum(), found.square().sum(), found.sum() + q.pow(3).sum()):
            (gradient,) = torch.autograd.grad(loss, q, create_graph=True)
            with pytest.raises(NoSecondDerivative, match="impl=fla have no second derivative"), name_refusals():
                torch.autograd.grad(gradient.sum(), q)


def test_without_cuda_or_the_library_one_line_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError) as caught:
        require_kernels(FLA)
    assert str(caught.value) == (
        "mechanism.gla.impl=fla needs a CUDA device; impl=reference computes the same everywhere"
    )
    require_kernels({"mechanism": part("mechanisms", "gla")})
    with pytest.raises(RuntimeError, match=r"^impl=fla needs a CUDA device; impl=reference computes the same$"):
        recurrences.gated_linear_attention(*(drawn(1)[place] for place in (0, 1, 2, 4)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    find_spec, installed = recurrences.importlib.util.find_spec, {"triton": None, "fla": object()}
    monkeypatch.setattr(
        recurrences.importlib.util, "find_spec", lambda name: installed[name] if name in installed else find_spec(name)
    )
    with pytest.raises(ValueError, match=r"needs triton \(pip install flash-linear-attention\); impl=reference"):
        require_kernels(FLA)
    installed["triton"] = object()
    require_kernels(FLA)
    require_kernels(FLA, torch.device("cuda"))
    with pytest.raises(ValueError, match=r"^mechanism\.gla\.impl=fla needs device=cuda; impl=reference"):
        require_kernels(FLA, torch.device("cpu"))
    monkeypatch.setattr(recurrences.importlib, "import_module", lambda name: SimpleNamespace(chunk_gla=None))
    with pytest.raises(RuntimeError, match=r"^impl=fla computes on CUDA, and the model is on a CPU; use device=cuda$"):
        recurrences.gated_linear_attention(*(drawn(KEYS)[place] for place in (0, 1, 2, 4)))


# q, k, v and the output are rounded by half a unit each; the gradient of a square has both y and its derivative; the
# delta rule's state subtracts what it has read, which is about as large again
BF16 = 4 * 2**-8 * 2 * 2
MIXERS = {
    "retnet": ({"chunk": 4}, "chunk_simple_gla"),
    "gla": ({"chunk": 4, "expand_k": 1.0, "expand_v": 2.0, "conv": 3}, "chunk_gla"),
    "hgrn2": ({"chunk": 4}, "chunk_gla"),
    "deltanet": ({"chunk": 4}, "chunk_delta_rule"),
    "gated_deltanet": ({"chunk": 4}, "chunk_gated_delta_rule"),
    "kda": ({"chunk": 4}, "chunk_kda"),
}


@pytest.mark.parametrize(("name", "settings", "kernel"), [(name, *told) for name, told in MIXERS.items()])
def test_a_mixer_on_kernels_reads_what_its_reference_reads(monkeypatch, name, settings, kernel):
    """Up to the rounding of queries, keys and values, at positions that are no padding; so do the gradients."""
    calls = []
    monkeypatch.setattr(recurrences, "_kernel", stand_in(calls))
    x_BND = torch.randn(BATCH, NUM, 12, generator=torch.Generator().manual_seed(1))
    mask_BN = torch.ones(BATCH, NUM, dtype=torch.bool)
    mask_BN[0, [0, 3, 6]] = False
    shape = {"width": 12, "heads": HEADS, "direction": "causal", "layer": 1, "num_layers": 2}
    found = {}
    for impl in ("reference", "fla"):
        layer = build_seeded(partial(build, name, **shape, impl=impl, **settings))
        given = x_BND.clone().requires_grad_()
        read = before_norm(layer, given, mask_BN=mask_BN)
        y_BND = layer(given, mask_BN=mask_BN)[mask_BN]
        (gradient,) = torch.autograd.grad(y_BND.square().sum(), given)
        read = read if read.shape[1] == NUM else read.transpose(1, 2)
        found[impl] = (read[mask_BN], y_BND, gradient)
    assert calls == [kernel] * 2, "the reference calls none"
    for theirs, ours in zip(found["reference"], found["fla"], strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) > 1e-5
        assert_within(float((ours - theirs).norm() / theirs.norm()), BF16)


def test_what_is_made_of_others_tells_of_their_kernels():
    written = {
        "mix": {"pattern": ["sa", "gla"], "gla": {"impl": "fla"}},
        "two_way": {"of": "kda", "kda": {"impl": "fla"}},
        "gla": {"impl": "fla"},
        "sa": {},
        "deltanet": {},
    }
    found = {
        name: tuple(
            asked.setting for asked in kernels_of({"mechanism": part("mechanisms", {"name": name, **settings})})
        )
        for name, settings in written.items()
    }
    assert found == {
        "mix": ("mechanism.mix.gla.impl=fla",),
        "two_way": ("mechanism.two_way.kda.impl=fla",),
        "gla": ("mechanism.gla.impl=fla",),
        "sa": (),
        "deltanet": (),
    }
