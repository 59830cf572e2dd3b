"""The tokenizer's encoder and decoders, mirror images of each other.

Each consists of linear maps, convolutions and a transformer of any mechanism.
"""

from __future__ import annotations

from torch import Tensor, nn

from stability.config.parts import Part
from stability.config.tokenizer import StackSize, TokenizerRunSpec
from stability.mechanisms import MixerShape, without_padding
from stability.models.backbone import hold_once
from stability.models.block import Block, Context, CrossBranch
from stability.models.init import initialise
from stability.registry import Registry

NUM_CONVOLUTIONS = 2
ANGSTROM_PER_UNIT = 10.0  # coordinates enter and leave the networks in nanometres, which are of order 1


def _norm(norm: Part, width: int) -> nn.Module:
    return Registry("norms").load(norm.name).build(norm.settings, width)


class ConvolutionBlock(nn.Module):
    """Residual convolution x + W·GELU(conv(norm(x))) over ``kernel`` residues; padding is masked."""

    def __init__(self, width: int, kernel: int, norm: Part):
        super().__init__()
        self.norm = _norm(norm, width)
        self.convolution = nn.Conv1d(width, width, kernel, padding=kernel // 2)
        self.out = nn.Linear(width, width)

    def forward(self, x_BND: Tensor, mask_BN: Tensor) -> Tensor:
        normed_BDN = without_padding(self.norm(x_BND), mask_BN).transpose(1, 2)
        return x_BND + self.out(nn.functional.gelu(self.convolution(normed_BDN)).transpose(1, 2))


class Stack(nn.Module):
    """Pre-norm transformer blocks and a final norm; with ``cross`` each block reads a context."""

    def __init__(self, spec: TokenizerRunSpec, size: StackSize, cross: Part | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(_block(spec, size, layer, cross) for layer in range(size.layers))
        hold_once(self.blocks)
        self.final_norm = _norm(spec.norm, size.width)

    def forward(self, x_BND: Tensor, mask_BN: Tensor, context: Context | None = None) -> Tensor:
        """Return the final hidden states (B, N, D).

        Args:
            x_BND: hidden states.
            mask_BN: True if the residue is valid.
            context: context of the cross branches.
        """
        for block in self.blocks:
            x_BND = block(x_BND, mask_BN, context)
        return self.final_norm(x_BND)


def _block(spec: TokenizerRunSpec, size: StackSize, layer: int, cross: Part | None) -> Block:
    """Build one bidirectional block, with a cross branch if ``cross`` names a mechanism."""
    shape = MixerShape(size.width, size.heads, "bidirectional", layer, size.layers)
    residual = Registry("residuals").load("identity")
    connections = [residual(residual.Config(), width=size.width, layer=layer) for _ in range(3)]
    mechanisms = Registry("mechanisms")
    branch = None
    if cross is not None:
        branch = CrossBranch(
            mechanisms.load(cross.name).build(cross.settings, shape), _norm(spec.norm, size.width), connections[2]
        )
    return Block(
        mechanisms.load(spec.mechanism.name).build(spec.mechanism.settings, shape),
        Registry("ffns").load(spec.ffn.name).build(spec.ffn.settings, size.width, spec.ffn_multiple),
        norms=(_norm(spec.norm, size.width), _norm(spec.norm, size.width)),
        residuals=(connections[0], connections[1]),
        cross=branch,
    )


def _mlp(num_inputs: int, width: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, width), nn.GELU(), nn.Linear(width, num_outputs))


class Encoder(nn.Module):
    """Coordinates (B, N, 3 atoms, 3) in Å, centred → z (B, N, F).

    Layers: linear → convolutions → transformer → linear, GELU, linear.
    """

    def __init__(self, spec: TokenizerRunSpec):
        super().__init__()
        width = spec.encoder.width
        self.embed = nn.Linear(9, width)
        self.convolutions = nn.ModuleList(
            ConvolutionBlock(width, spec.kernel, spec.norm) for _ in range(NUM_CONVOLUTIONS)
        )
        self.stack = Stack(spec, spec.encoder)
        self.to_code = _mlp(width, width, len(spec.levels))
        initialise(self, NUM_CONVOLUTIONS + 2 * spec.encoder.layers)

    def forward(self, coords_BNAX: Tensor, mask_BN: Tensor) -> Tensor:
        x_BND = self.embed(without_padding(coords_BNAX.flatten(2), mask_BN) / ANGSTROM_PER_UNIT)
        for convolution in self.convolutions:
            x_BND = convolution(x_BND, mask_BN)
        return self.to_code(self.stack(x_BND, mask_BN))


class Decoder(nn.Module):
    """Codes (B, N, F) → atoms (B, N, A, 3) in Å.

    The atoms are in a frame of the decoder's own. Layers: linear, GELU, linear → transformer → convolutions → linear.

    Args:
        spec: the tokenizer.
        size: layers, width and heads of the transformer.
        num_atoms: A.
        vocab_size: vocabulary of the sequence that every block reads through ``cross``; None: no sequence is read.
    """

    def __init__(self, spec: TokenizerRunSpec, size: StackSize, num_atoms: int, vocab_size: int | None = None):
        super().__init__()
        cross = None if vocab_size is None else spec.cross
        self.num_atoms = num_atoms
        self.from_code = _mlp(len(spec.levels), size.width, size.width)
        self.residue = None if vocab_size is None else nn.Embedding(vocab_size, size.width)
        self.context_norm = None if vocab_size is None else _norm(spec.norm, size.width)
        self.stack = Stack(spec, size, cross)
        self.convolutions = nn.ModuleList(
            ConvolutionBlock(size.width, spec.kernel, spec.norm) for _ in range(NUM_CONVOLUTIONS)
        )
        self.to_atoms = nn.Linear(size.width, 3 * num_atoms)
        initialise(self, NUM_CONVOLUTIONS + (2 if cross is None else 3) * size.layers)

    def forward(self, codes_BNF: Tensor, mask_BN: Tensor, sequence_BN: Tensor | None = None) -> Tensor:
        """Return the atoms (B, N, A, 3) in Å.

        Args:
            codes_BNF: codes on the grid.
            mask_BN: True if the residue is valid.
            sequence_BN: residue tokens, required with ``vocab_size``.
        """
        context = None
        if self.residue is not None and self.context_norm is not None:
            assert sequence_BN is not None
            context = Context(self.context_norm(self.residue(sequence_BN)), mask_BN)
        x_BND = self.stack(self.from_code(without_padding(codes_BNF, mask_BN)), mask_BN, context)
        for convolution in self.convolutions:
            x_BND = convolution(x_BND, mask_BN)
        return self.to_atoms(x_BND).unflatten(-1, (self.num_atoms, 3)) * ANGSTROM_PER_UNIT
