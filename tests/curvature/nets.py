"""Small nets and losses for the curvature tests, and the dense Hessian that the library's answers are held to."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


class TinyTransformer(nn.Module):
    """One pre-LayerNorm block with SDPA, GELU and tied embeddings, big enough to hold every trap of facts 8 and small
    enough for a dense Hessian."""

    def __init__(self, width=8, heads=2, vocabulary=7, causal=True, dropout=0.0):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.embed = nn.Embedding(vocabulary, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(-2))
        x = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return self.norm3(x) @ self.embed.weight.T


def tiny(seed=0, dtype=torch.float64, scale=1.0, **kwargs):
    """(net, params, tokens): random weights, LayerNorm gains included, that float32 holds exactly; ``scale`` multiplies
    the matrices."""
    torch.manual_seed(seed)
    net = TinyTransformer(**kwargs).to(dtype)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_((param.add(0.3 * torch.randn_like(param)) * (scale if param.ndim > 1 else 1)).float())
    return net, dict(net.named_parameters()), torch.randint(0, 7, (3, 6))


def token_loss(net, tokens, reduction="mean", prefix=""):
    """params -> cross entropy of the next token, for `directional`."""

    def loss(params):
        logits = torch.func.functional_call(
            net, {prefix + name: param for name, param in params.items()}, (tokens[:, :-1],)
        )
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction)

    return loss


def random_direction(params, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator).to(p.dtype) for name, p in params.items()}


def flatten(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()])


def unflatten(vector, params):
    pieces = vector.split([param.numel() for param in params.values()])
    return {name: piece.reshape(param.shape) for (name, param), piece in zip(params.items(), pieces, strict=True)}


def dense_hessian(loss, params):
    """H of ``loss`` in the order of ``params``, by torch.autograd.functional: reverse over reverse, which is right
    through LayerNorm."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch.autograd.functional.hessian(lambda vector: loss(unflatten(vector, params)), flatten(params))


def gradient_graph(loss, params):
    """(θ, ∇L(θ)) flat, the gradient with its graph."""
    vector = flatten(params).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        value = loss(unflatten(vector, params))
    return vector, torch.autograd.grad(value, vector, create_graph=True)[0]


def dense_gradient_and_hessian(loss, params):
    """∇L and H as `dense_hessian` gives it, 256 rows of the same reverse over reverse at a time (vmap over the second
    backward only)."""
    vector, gradient = gradient_graph(loss, params)
    rows = torch.eye(len(vector), dtype=vector.dtype).split(256)
    blocks = [torch.autograd.grad(gradient, vector, unit, retain_graph=True, is_grads_batched=True)[0] for unit in rows]
    return gradient.detach(), torch.cat(blocks)


def row_of_hessian(loss, params, index):
    vector, gradient = gradient_graph(loss, params)
    return torch.autograd.grad(gradient[index], vector)[0]


class HalfSlope(torch.autograd.Function):
    """x² with half of its gradient: the second derivative is that of the gradient, which alone is wrong."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad
