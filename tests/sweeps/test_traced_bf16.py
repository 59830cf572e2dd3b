"""A plan's emulation of CUDA's autocast, against torch's own autocast on a CPU and the lists in ATen's header."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from kernels.roofline import H100
from stability.build import build_model, build_objective
from stability.corpora.cache import prepare_for_plan
from stability.mechanisms._edge_weights import precision_on
from stability.models.passes import computing_in, in_float32, rounds_products
from stability.objectives import _autocast
from sweeps import traced
from sweeps.estimated import GPUS, estimate_step
from sweeps.traced import POLICIES, EmulatedAutocast, FusedAttention, trace
from tests.reading import read_spec

META, CPU = torch.device("meta"), torch.device("cpu")
SMALL = [
    "model.layers=2",
    "model.heads=2",
    "model.width=64",
    "model.positions=32",
    "batch=4",
    "microbatch=null",
    "primary=null",
]
HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
# of ATen's lists, operations without a call of their own in Python
NO_PYTHON = {"_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_scaled_dot_product_flash_attention"}
aten = torch.ops.aten
NOT_REGISTERED = {  # torch.utils.flop_counter's own formulas, for the CPU's attention
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop_count,
}


class Products(TorchDispatchMode):
    """Counts FLOPs by the dtype of the factors."""

    def __init__(self):
        super().__init__()
        self.flops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, packet = func(*args, **(kwargs or {})), func._overloadpacket
        if packet in flop_registry:
            self.flops[args[0].dtype] += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif packet in NOT_REGISTERED:
            num_shapes = 3 + packet.__name__.endswith("backward")
            self.flops[args[0].dtype] += NOT_REGISTERED[packet](*(each.shape for each in args[:num_shapes]))
        return out


def first_run(*words):
    spec = read_spec("sweep", list(words))
    corpus, _ = prepare_for_plan(spec.data, Path("no cache"))
    return next(run for _, run in spec.points(corpus.fingerprint)), corpus


def losses_of(run, corpus):
    """A run's model and loss, on the CPU with torch's autocast and on the meta device without any."""
    objective, generator = build_objective(run, corpus.format), torch.Generator().manual_seed(0)
    drawn = corpus.longest_batch(run.batch, objective.tokens_needed(run.model.positions), generator)
    examples = objective.examples(objective.augmented(drawn, generator), generator)

    def on(device):
        with device:
            model = build_model(run, corpus.format)
        moved = examples.to(device)
        return model, lambda: objective.training_loss(model, moved).total

    return on(CPU), on(META), int(examples.weights_BN.count_nonzero())


class Counted(TorchDispatchMode):
    """Gives `Tensor.nonzero` on the meta device the CPU's number of positions."""

    def __init__(self, num_counted):
        super().__init__()
        self.num_counted = num_counted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.nonzero.default and args[0].is_meta:
            return torch.empty(self.num_counted, args[0].ndim, dtype=torch.int64, device=META)
        return func(*args, **(kwargs or {}))


def both(run, corpus, watch):
    """What ``watch()`` counts in a step under torch's autocast, and under the emulation."""
    (_, on_cpu), (_, on_meta), num_counted = losses_of(run, corpus)
    real, emulated = watch(), watch()
    with real:
        with torch.autocast("cpu", torch.bfloat16):
            total = on_cpu()
        total.backward()
    autocast = EmulatedAutocast()
    with Counted(num_counted), emulated, FusedAttention(), autocast:
        traced._run_backward(autocast.run(on_meta, "bf16"))
    return real, emulated


STEPS = {
    "a GPT": ["study=residuals", "residual=[identity]"],
    "streams": ["study=residuals", "residual=[mhc]"],
    "consensus with experts": ["study=text_54m", "mechanism=[sc]", "ffn=moe", "lr=1e-3"],
    "a scan": ["study=residuals", "mechanism=[mamba2]", "residual=[identity]"],
    "a recurrence": ["study=residuals", "mechanism=[gated_deltanet]", "residual=[identity]"],
}


@pytest.mark.parametrize("name", STEPS)
def test_products_of_each_dtype_are_those_of_torchs_own_autocast(name):
    real, emulated = both(*first_run(*STEPS[name], *SMALL), Products)
    assert real.flops == emulated.flops and real.flops[torch.bfloat16] > 0
    assert (real.flops[torch.float32] > 0) == (name != "a GPT"), "else a forgotten `in_float32` would not be noticed"


class Saved(ExitStack):
    """Adds up the bytes that are saved for the backward pass beside the parameters, a storage once."""

    def __enter__(self):
        self.kept, self.bytes = {}, 0
        self.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor))
        return super().__enter__()

    def _pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.kept and not (tensor.is_leaf and tensor.requires_grad):
            self.kept[storage._cdata] = storage
            self.bytes += storage.nbytes()
        return tensor


def test_a_gpt_saves_as_many_bytes_as_under_torchs_own_autocast():
    run, corpus = first_run(*STEPS["a GPT"], *SMALL, "model.positions=128")
    real, emulated = both(run, corpus, Saved)
    assert emulated.bytes == pytest.approx(real.bytes, rel=0.01)
    (_, on_cpu), *_ = losses_of(run, corpus)
    with Saved() as wide:
        on_cpu()
    assert wide.bytes > 1.2 * real.bytes, "else this would not notice a step in float32"


def test_operations_are_those_that_atens_header_lists_for_cuda():
    if not HEADER.exists():
        pytest.skip("this torch comes without headers")
    lists = {
        name: {op.split(",")[0] for op in re.findall(r"_\(([\w, ]+)\)", body)}
        for name, body in re.findall(r"#define AT_FORALL_(\w+)\(_\)((?:.*\\\n)+.*\n)", HEADER.read_text())
    }
    policies = {"LOWER_PRECISION_FP": "narrow", "FP32": "wide", "FP32_SET_OPT_DTYPE": "summed", "PROMOTE": "widest"}
    expected = {op: policy for name, policy in policies.items() for op in lists[name] - NO_PYTHON}
    assert len(expected) > 100 and expected.items() <= POLICIES.items()
    # Python's spellings of these, and functions made of them
    assert set(POLICIES) - set(expected) == {
        "rmatmul", "linalg_matmul", "rpow", "rdiv", "square", "cross_entropy", "interpolate", "norm", "softmin",
        "linalg_norm",
    }  # fmt: skip


CALLS = {
    torch.bfloat16: {
        "a @ b": lambda a, b: a @ b, "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b), "linear": F.linear,
        "attention": lambda a, b: F.scaled_dot_product_attention(a[None, None], b[None, None], b[None, None]),
        "gelu": lambda a, b: F.gelu(a @ b), "mean": lambda a, b: (a @ b).mean(), "a b": lambda a, b: (a @ b) * (b @ a),
    },
    torch.float32: {
        "softmax": lambda a, b: (a @ b).softmax(-1), "F.softmax": lambda a, b: F.softmax(a @ b, -1),
        "sum": lambda a, b: (a @ b).sum(0), "2 ** x": lambda a, b: 2 ** (a @ b), "x ** 2": lambda a, b: (a @ b) ** 2,
        "1 / x": lambda a, b: 1 / (a @ b), "square": lambda a, b: (a @ b).square(), "exp": lambda a, b: (a @ b).exp(),
        "normalize": lambda a, b: F.normalize(a @ b, dim=-1), "rms_norm": lambda a, b: F.rms_norm(a @ b, (4,)),
        "layer_norm": lambda a, b: F.layer_norm(a @ b, (4,)), "x + y": lambda a, b: a @ b + a,
        "cross_entropy": lambda a, b: F.cross_entropy(a @ b, torch.zeros(4, dtype=torch.int64, device=a.device)),
        "dot": lambda a, b: torch.dot((a @ b)[0], a[0]), "addcmul": lambda a, b: torch.addcmul(a, a @ b, a @ b),
    },
}  # fmt: skip


@pytest.mark.parametrize(("call", "dtype"), [(call, dtype) for dtype in CALLS for call in CALLS[dtype]])
def test_results_have_the_dtype_of_cudas_autocast(call, dtype):
    a, b = torch.empty(4, 4, device=META), torch.empty(4, 4, device=META)
    with EmulatedAutocast():
        assert CALLS[dtype][call](a, b).dtype == torch.float32
        with computing_in("bf16", META):
            assert CALLS[dtype][call](a, b).dtype == dtype
            with in_float32(META):
                assert CALLS[dtype][call](a, b).dtype == torch.float32
            assert (a.double() @ b.double()).dtype == torch.float64


def test_the_rest_of_the_code_sees_the_emulation():
    factor = torch.empty(2, 2, device=META)
    seen = []
    for context in (computing_in("float32", META), computing_in("bf16", META)):
        with context:
            seen.append((rounds_products(META), precision_on(META), _autocast(factor).dtype))
    assert seen == [(False, "ieee", torch.float32), (True, "bf16", torch.bfloat16)]


class Casts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func is aten._to_copy.default and args[0].dtype == torch.float32
        return func(*args, **(kwargs or {}))


def test_a_weight_is_cast_once_a_forward_pass_and_again_in_a_recomputation():
    """As torch's cache has it, which lives as long as the outermost autocast."""

    def counted(device, loss):
        weight = torch.ones(4, 4, device=device, requires_grad=True)
        with Casts() as casts:
            loss(weight, torch.ones(4, 4, dtype=torch.bfloat16, device=device))
        return casts.num

    def total(weight, x):
        again = checkpoint(lambda w: x @ w, weight, use_reentrant=False, preserve_rng_state=False)
        return (x @ weight + x @ weight + again).mean()

    def real(weight, x):
        with torch.autocast("cpu", torch.bfloat16):
            found = total(weight, x)
        found.backward()

    def emulated(weight, x):
        autocast = EmulatedAutocast()
        with autocast:
            traced._run_backward(autocast.run(lambda: total(weight, x), "bf16"))

    assert counted(CPU, real) == counted(META, emulated) == 2


def test_products_left_in_float32_take_float32s_peak():
    """67 TFLOP/s, where bfloat16 has 989."""

    def traced_in(precision, context=nullcontext):
        layer = torch.nn.Linear(4096, 4096, bias=False, device=META)
        x = torch.empty(4096, 4096, device=META)

        def loss():
            with context():
                return layer(x).mean()

        return trace(layer, loss, device=H100, precision=precision, num_counted=1, times=1)

    wide, narrow = traced_in("float32"), traced_in("bf16")
    assert traced_in("bf16", lambda: in_float32(META)) == wide
    assert narrow.flops == wide.flops and narrow.seconds < 0.3 * wide.seconds


@pytest.mark.parametrize("mechanism", ["sa", "sc"])
def test_a_step_in_bfloat16_takes_less_memory_and_time_than_in_float32_but_no_less_than_its_peak(mechanism):
    gpu, words = GPUS["h100"], ["study=text_54m", f"mechanism=[{mechanism}]", "lr=1e-3"]
    wide, narrow = (
        estimate_step(*first_run(*words, f"precision={precision}"), gpu) for precision in ("float32", "bf16")
    )
    ratio = gpu.device.peaks["float32"] / gpu.device.peaks["bf16"]
    assert ratio * wide[0] < narrow[0] < wide[0] and 0.5 * wide[1] < narrow[1] < 0.95 * wide[1]
