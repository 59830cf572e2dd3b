"""The operations that have a rule, as functions of two (3, 4) tensors: what the tests of the Taylor pass run over."""

import torch
from torch.nn import functional as F

G = torch.Generator().manual_seed(0)
INDEX = torch.tensor([2, 0, 1, 2])
MASK = torch.tensor([[True, False, True, True], [False, True, True, False], [True, True, False, True]])
CONSTANT = torch.randn(3, 4, dtype=torch.float64, generator=G)
IMAGE = torch.randn(2, 3, 5, 5, dtype=torch.float64, generator=G)


def positive(x):
    return x * x + 0.5


def triangle(x):
    return (x[:, :3] * 0.1).tril() + 2 * torch.eye(3, dtype=x.dtype)


# name -> f(x), and below f(x, y), with x and y (3, 4) jets; the sum of its squares is the loss
POINTWISE = {
    "exp": torch.exp,
    "expm1": torch.expm1,
    "exp2": torch.exp2,
    "sin": torch.sin,
    "cos": torch.cos,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "tanh": torch.tanh,
    "atan": torch.atan,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "abs": torch.abs,
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "softplus_beta": lambda x: F.softplus(x, 3, 2),
    "logsigmoid": F.logsigmoid,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.5),
    "mish": F.mish,
    "relu6": F.relu6,
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "square": torch.square,
    "cube": lambda x: x**3,
    "power": lambda x: positive(x) ** 1.7,
    "power_zero": lambda x: x**0,
    "power_one": lambda x: x**1,
    "rpow": lambda x: 2.0**x,
    "sqrt": lambda x: positive(x).sqrt(),
    "rsqrt": lambda x: positive(x).rsqrt(),
    "log": lambda x: positive(x).log(),
    "log2": lambda x: positive(x).log2(),
    "log1p": lambda x: positive(x).log1p(),
    "reciprocal": lambda x: 1 / positive(x),
    "neg": torch.neg,
    "softsign": F.softsign,
    "hardtanh": F.hardtanh,
    "tanhshrink": F.tanhshrink,
    "hardshrink": F.hardshrink,
    "hardshrink_narrow": lambda x: F.hardshrink(x, 0.2),
    "softshrink": F.softshrink,
    "softshrink_narrow": lambda x: F.softshrink(x, 0.2),
    "hardswish": F.hardswish,
    "glu": F.glu,
    "threshold": lambda x: F.threshold(x, 0.1, 2.0),
    "fmod": lambda x: torch.fmod(x, 0.3),
    "remainder": lambda x: x % 0.3,
    "frac": torch.frac,
    "nan_to_num": lambda x: torch.nan_to_num(x * x),
    "logit": lambda x: torch.logit(torch.sigmoid(x)),
}
PRODUCTS = {
    "mul": lambda x, y: x * y * CONSTANT,
    "mul_scalar": lambda x, y: 3 * x + y * 0.5,
    "div": lambda x, y: x / positive(y),
    "div_constant": lambda x, y: x / 3 + CONSTANT / positive(y),
    "rsub": lambda x, y: 1 - x * y,
    "sub_alpha": lambda x, y: torch.sub(x, y * y, alpha=2),
    "broadcast": lambda x, y: x[:, :1] * y + x[0],
    "pow_tensor": lambda x, y: positive(x) ** y,
    "matmul": lambda x, y: x @ y.T,
    "rmatmul": lambda x, y: CONSTANT @ x.T,
    "matmul_3d_2d": lambda x, y: torch.stack([x, y]) @ (x * y).T,
    "matmul_batched": lambda x, y: torch.stack([x, y]) @ torch.stack([y, x * x]).mT,
    "matmul_broadcast": lambda x, y: torch.stack([x, y])[None] @ torch.stack([y, x])[:, None].mT,
    "matmul_vector": lambda x, y: x @ y[0],
    "bmm": lambda x, y: torch.bmm(x[None], y.T[None]),
    "mv": lambda x, y: torch.mv(x, y[1]),
    "dot": lambda x, y: torch.dot(x[0], y[1]),
    "outer": lambda x, y: torch.outer(x[0], y[1]),
    "addmm": lambda x, y: torch.addmm(x[:, :3], x, y.T, beta=2, alpha=0.5),
    "baddbmm": lambda x, y: torch.baddbmm(x[:, :3], x[None], y.T[None]),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "einsum_one": lambda x, y: torch.einsum("ij->j", x * x),
    "einsum_three": lambda x, y: torch.einsum("ij,kj,kl->il", x, y, x),
    "linear": lambda x, y: F.linear(x, y, y[:, 0]),
    "linear_constant_x": lambda x, y: F.linear(CONSTANT, y, x[:, 0]),
    "linear_constant_w": lambda x, y: F.linear(x * x, CONSTANT),
    "linear_bias_only": lambda x, y: F.linear(CONSTANT, CONSTANT, x[:, 0]) ** 2,
    "linear_3d": lambda x, y: F.linear(torch.stack([x, y]), x * y, y[:, 0] ** 2),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=2),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, positive(y), value=2),
    "lerp": lambda x, y: torch.lerp(x, y, x * y),
    "conv1d": lambda x, y: F.conv1d(x[None], torch.stack([y[:, :2], y[:, 2:]]), y[:2, 0], padding=1),
    "conv2d": lambda x, y: F.conv2d(IMAGE, x.reshape(1, 3, 2, 2) * y.reshape(1, 3, 2, 2)),
    "solve_triangular": lambda x, y: torch.linalg.solve_triangular(triangle(x), y, upper=False),
    "solve_right": lambda x, y: torch.linalg.solve_triangular(triangle(x).mT, y.T, upper=True, left=False),
    "solve_unit": lambda x, y: torch.linalg.solve_triangular(triangle(x), y, upper=False, unitriangular=True),
    "maximum": lambda x, y: torch.maximum(x, y),
    "minimum": lambda x, y: torch.minimum(x, CONSTANT),
    "prod": lambda x, y: (x * y).prod(-1),
    "prelu": lambda x, y: F.prelu(x, y[0, :1]),
    "logaddexp": lambda x, y: torch.logaddexp(x, y),
    "atan2": lambda x, y: torch.atan2(x, y),
    "xlogy": lambda x, y: torch.xlogy(x, positive(y)),
    "inverse": lambda x, y: torch.linalg.inv(x @ y.T + 3 * torch.eye(3, dtype=x.dtype)),
    "solve": lambda x, y: torch.linalg.solve(x @ x.T + torch.eye(3, dtype=x.dtype), y),
    "cumprod": lambda x, y: x.cumprod(-1),
}
SHAPES = {
    "reshape": lambda x, y: (x * y).reshape(2, 6).view(4, 3),
    "transpose": lambda x, y: (x * y).T.contiguous().flatten(),
    "permute": lambda x, y: torch.stack([x, y * y]).permute(2, 0, 1),
    "expand": lambda x, y: (x * y)[:, None].expand(3, 5, 4),
    "slices": lambda x, y: (x * y)[1:, ::2],
    "gather": lambda x, y: (x * y).gather(1, INDEX[None, :3].expand(3, 3)),
    "index": lambda x, y: (x * y)[INDEX],
    "index_mask": lambda x, y: (x * y)[MASK],
    "index_select": lambda x, y: (x * y).index_select(0, INDEX),
    "cat": lambda x, y: torch.cat([x * y, CONSTANT, y]),
    "stack": lambda x, y: torch.stack([x * y, CONSTANT]),
    "chunk": lambda x, y: torch.mul(*(x * y).chunk(2, -1)),
    "split": lambda x, y: (x * y).split([1, 3], -1)[1],
    "unbind": lambda x, y: torch.mul(*(x * y).unbind(0)[:2]),
    "roll": lambda x, y: (x * y).roll(1, 0),
    "flip": lambda x, y: (x * y).flip(0),
    "repeat": lambda x, y: (x * y).repeat(2, 1),
    "repeat_interleave": lambda x, y: (x * y).repeat_interleave(2, 0),
    "tril": lambda x, y: (x * y).tril(),
    "pad": lambda x, y: F.pad(x * y, (1, 2), value=3.0),
    "unfold": lambda x, y: (x * y).unfold(1, 2, 1),
    "where": lambda x, y: torch.where(MASK, x * y, 2.0),
    "where_both": lambda x, y: torch.where(MASK, x * x, y),
    "masked_fill": lambda x, y: (x * y).masked_fill(MASK, 5.0),
    "diagonal": lambda x, y: (x * y).diagonal(),
    "sum": lambda x, y: (x * y).sum(0, keepdim=True),
    "mean": lambda x, y: (x * y).mean(-1),
    "cumsum": lambda x, y: (x * y).cumsum(0),
    "float_cast": lambda x, y: (x * y).to(torch.float64) * y.double(),
    "clone": lambda x, y: (x * y).clone(),
    "embedding": lambda x, y: F.embedding(INDEX, x * y),
    "embedding_padding": lambda x, y: F.embedding(INDEX, x * x, padding_idx=2),
    "index_add": lambda x, y: x.index_add(0, INDEX[:3], x * y),
    "scatter_add": lambda x, y: (x * x).scatter_add(1, INDEX.expand(3, 4), x * y),
    "index_put": lambda x, y: (x * x).index_put((INDEX[1:3],), y[:2] * x[:2]),
    "select_scatter": lambda x, y: torch.select_scatter(x * x, y[0] * x[0], 0, 1),
    "scatter_constant": lambda x, y: CONSTANT.scatter_add(1, INDEX.expand(3, 4), x * y),
    "fft": lambda x, y: torch.fft.fft2(x * y).real,
    "rfft": lambda x, y: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(y), n=4),
    "unsqueeze": lambda x, y: (x * y)[None].squeeze(0).unsqueeze(-1),
    "meshed": lambda x, y: torch.diag_embed(x[0] * y[0]),
    "complex": lambda x, y: torch.view_as_real(
        torch.view_as_complex(x.reshape(3, 2, 2)) * torch.view_as_complex(y.reshape(3, 2, 2))
    ),
    "avg_pool": lambda x, y: F.avg_pool1d((x * y)[None], 2),
    "comparison": lambda x, y: (x > y) * x * y,
    "zeros_like": lambda x, y: torch.zeros_like(x) + x * x,
    "new_zeros": lambda x, y: x.new_zeros(3, 4) + x * y + torch.ones_like(y),
}
REDUCTIONS = {
    "softmax": lambda x, y: (x * y).softmax(-1),
    "softmax_dim": lambda x, y: F.softmax(x * y, 0),
    "log_softmax": lambda x, y: (x * y).log_softmax(-1),
    "logsumexp": lambda x, y: (x * y).logsumexp(-1),
    "logsumexp_keep": lambda x, y: torch.logsumexp(x * x, (0, 1), keepdim=True),
    "layer_norm": lambda x, y: F.layer_norm(x * y, (4,), y[0], x[1], 1e-3),
    "layer_norm_plain": lambda x, y: F.layer_norm(x, (4,)),
    "layer_norm_2d": lambda x, y: F.layer_norm(x * y, (3, 4), y, None),
    "layer_norm_constant_x": lambda x, y: F.layer_norm(CONSTANT, (4,), x[0] ** 2, y[0]),
    "rms_norm": lambda x, y: F.rms_norm(x * y, (4,), y[0] * x[0]),
    "rms_norm_plain": lambda x, y: F.rms_norm(x, (4,)),
    "group_norm": lambda x, y: F.group_norm(x.T[None] * 1.5, 2, y[0], x[1]),
    "normalize": lambda x, y: F.normalize(x * y, dim=-1),
    "norm": lambda x, y: x.norm(dim=-1),
    "norm_all": lambda x, y: torch.linalg.vector_norm(x * y),
    "norm_one": lambda x, y: x.norm(1, dim=-1),
    "var": lambda x, y: (x * y).var(-1),
    "std": lambda x, y: x.std(0, unbiased=False),
    "amax": lambda x, y: (x * y).amax(-1),
    "max": lambda x, y: (x * y).max(-1).values,
    "max_all": lambda x, y: (x * y).max(),
    "min_keep": lambda x, y: (x * y).min(0, keepdim=True)[0],
    "sort": lambda x, y: (x * y).sort(-1, descending=True).values,
    "sort_first": lambda x, y: (x * y).sort(0).values,
    "topk": lambda x, y: (x * y).topk(2).values,
    "topk_first": lambda x, y: (x * y).topk(2, 0)[0],
    "cummax": lambda x, y: (x * y).cummax(0).values,
    "var_mean": lambda x, y: torch.mul(*torch.var_mean(x * y, -1, keepdim=True)),
    "std_mean": lambda x, y: torch.std_mean(x * y, 0, correction=0)[0],
    "logcumsumexp": lambda x, y: torch.logcumsumexp(x * y, 1),
    "cosine": lambda x, y: F.cosine_similarity(x, y),
}
LOSSES = {
    "cross_entropy": lambda x, y: F.cross_entropy(x * y, INDEX[:3]),
    "cross_entropy_ignore": lambda x, y: F.cross_entropy(x * y, torch.tensor([1, -100, 3])),
    "cross_entropy_sum": lambda x, y: F.cross_entropy(x, INDEX[:3], reduction="sum"),
    "cross_entropy_none": lambda x, y: F.cross_entropy(x * y, INDEX[:3], reduction="none"),
    "cross_entropy_smooth": lambda x, y: F.cross_entropy(x * y, INDEX[:3], label_smoothing=0.1),
    "cross_entropy_weight": lambda x, y: F.cross_entropy(x, INDEX[:3], weight=CONSTANT[0].abs()),
    "cross_entropy_3d": lambda x, y: F.cross_entropy((x * y)[None], INDEX[None]),
    "cross_entropy_soft": lambda x, y: F.cross_entropy(x * y, CONSTANT.softmax(-1)),
    "nll": lambda x, y: F.nll_loss(x.log_softmax(-1), INDEX[:3]),
    "mse": lambda x, y: F.mse_loss(x * y, CONSTANT),
    "bce": lambda x, y: F.binary_cross_entropy_with_logits(x * y, MASK.double()),
    "kl": lambda x, y: F.kl_div(x.log_softmax(-1), CONSTANT.softmax(-1), reduction="batchmean"),
    "bce_plain": lambda x, y: F.binary_cross_entropy(x.sigmoid(), MASK.double()),
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x * y, CONSTANT, beta=0.7),
    "huber": lambda x, y: F.huber_loss(x * y, CONSTANT, delta=0.7),
    "bce_sum": lambda x, y: F.binary_cross_entropy_with_logits(x, MASK.double(), reduction="sum"),
}


GRAPH = {  # what a mechanism on a graph is made of
    "gather_columns": lambda x, y: (x * y).gather(0, torch.tensor([[0, 2, 1, 1]])),
    "take_along_dim": lambda x, y: torch.take_along_dim(x * y, (x * y).argsort(-1)[:, :2], -1),
    "index_add_alpha": lambda x, y: torch.index_add(CONSTANT, 0, INDEX[:3], x * y, alpha=2),
    "scatter_add_rows": lambda x, y: (x * x).scatter_add(0, INDEX[:, None].expand(4, 4)[:3], x * y),
    "scatter_reduce": lambda x, y: (x * x).scatter_reduce(1, INDEX.expand(3, 4), x * y, "sum"),
    "scatter_reduce_mean": lambda x, y: (x * x).scatter_reduce(
        1, INDEX.expand(3, 4), x * y, "mean", include_self=False
    ),
    "topk_gather": lambda x, y: (y * y).gather(-1, (x * y).topk(2).indices) * (x * y).topk(2).values,
    "topk_smallest": lambda x, y: (x * y).topk(2, dim=0, largest=False).values,
    "roll_both": lambda x, y: (x * y).roll((1, 2), (0, 1)),
    "index_accumulate": lambda x, y: (x * x).index_put((INDEX[[0, 1, 0]],), y * x, accumulate=True),
    "index_fill": lambda x, y: (x * y).index_fill(0, torch.tensor([1]), 2.0),
    "take": lambda x, y: torch.take(x * y, torch.tensor([0, 5, 5, 11])),
    "masked_select": lambda x, y: (x * y).masked_select(MASK),
    "diagonal_scatter": lambda x, y: torch.diagonal_scatter(x * x, y[:, 0] * y[:, 1]),
}
ELEMENTARY = {
    "log10": lambda x: torch.log10(positive(x)),
    "erfc": torch.erfc,
    "tan": lambda x: torch.tan(0.3 * x),
    "asin": lambda x: torch.asin(0.9 * x.tanh()),
    "acos": lambda x: torch.acos(0.9 * x.tanh()),
    "asinh": torch.asinh,
    "acosh": lambda x: torch.acosh(positive(x) + 1),
    "atanh": lambda x: torch.atanh(0.5 * x.tanh()),
}
LAYERS = {
    "batch_norm_eval": lambda x, y: F.batch_norm(x * y, CONSTANT[0], positive(CONSTANT[1]), y[0], x[1]),
    "batch_norm_of_batch": lambda x, y: F.batch_norm(
        (x * y).T[None] * IMAGE[:, 0, :4, :3], None, None, y[0], x[1], training=True
    ),
    "instance_norm": lambda x, y: F.instance_norm((x * y)[None], weight=y[:, 0], bias=x[:, 0]),
    "max_pool1d": lambda x, y: F.max_pool1d((x * y)[None], 2),
    "max_pool2d": lambda x, y: F.max_pool2d((x * y)[None, None], 2, stride=1, padding=1),
    "adaptive_pools": lambda x, y: F.adaptive_avg_pool1d((x * y)[None], 3) * F.adaptive_max_pool1d((x * y)[None], 3),
    "pads": lambda x, y: torch.cat([F.pad((x * y)[None], (1, 2), mode=mode) for mode in ("reflect", "replicate")]),
    "fold": lambda x, y: F.fold((x * y).T[None], (2, 4), (2, 2)),
    "interpolate": lambda x, y: torch.cat(
        [F.interpolate((x * y)[None], scale_factor=2, mode=mode) for mode in ("linear", "nearest")]
    ),
    "conv1d_groups": lambda x, y: F.conv1d(
        (x * y)[None, :2], y[:2, None, :2], groups=2, stride=2, dilation=2, padding=2
    ),
    "bilinear": lambda x, y: F.bilinear(x, y, torch.stack([y.T @ x, x.T @ y]), y[0, :2]),
    "addbmm": lambda x, y: torch.addbmm(x[:, :3], torch.stack([x, y]), torch.stack([y, x]).mT, beta=2, alpha=0.5),
    "addr": lambda x, y: torch.addr(x, x[:, 0], y[0], beta=2, alpha=0.5),
    "vdot": lambda x, y: torch.vdot(x[0], y[1]),
    "cross": lambda x, y: torch.linalg.cross(x[:, :3], y[:, :3]),
    "extremes": lambda x, y: torch.fmax(x * x, y) * torch.fmin(x, y * y),
    "aminmax": lambda x, y: torch.mul(*torch.aminmax(x * y, dim=1)),
    "cross_entropy_weight_smooth": lambda x, y: F.cross_entropy(
        x * y, torch.tensor([1, -100, 3]), weight=CONSTANT[0].abs(), label_smoothing=0.2
    ),
    "bce_pos_weight": lambda x, y: F.binary_cross_entropy_with_logits(
        x * y, MASK.double(), pos_weight=CONSTANT[0].abs()
    ),
}
WRONG_IN_TORCH = {  # double backward refuses these; differences of losses are all there is to hold them to
    "weight_norm": lambda x, y: torch._weight_norm(x, y[:, :1], 0),
    "weight_norm_of_columns": lambda x, y: torch._weight_norm(x * y, y[:1], 1),
}


def of_first(function):
    return lambda x, y: function(x)


OPERATIONS = (
    {name: of_first(function) for name, function in (POINTWISE | ELEMENTARY).items()}
    | PRODUCTS
    | SHAPES
    | REDUCTIONS
    | LOSSES
    | GRAPH
    | LAYERS
)
