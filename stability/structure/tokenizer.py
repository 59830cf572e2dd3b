"""Structure tokenizer: protein chains ↔ tokens of a finite codebook.

It is an FSQ autoencoder in two stages (consensus paper, E.1). Finite scalar quantization (Mentzer et al. 2023,
arXiv:2309.15505) has a fixed grid as its codebook: nothing to learn, nothing to collapse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from stability.config.base import validate
from stability.config.identity import fill_newer_fields, tokenizer_id
from stability.config.tokenizer import TokenizerRunSpec
from stability.corpora.proteins.alphabets import NUM_ATOMS
from stability.printable import line_of
from stability.runs.directory import RunDirectory
from stability.structure.crops import BACKBONE
from stability.structure.frames import in_frame
from stability.structure.networks import Decoder, Encoder
from stability.training import checkpoint

PADDING = -1  # token of an invalid residue
FOLDER = "tokenizers"


class StructureTokenizer(nn.Module):
    """Encoder, codebook and decoders of protein structure.

    Stage 1 has a light decoder to N, CA and C. The optional stage 2 decodes to 14 heavy atoms and also reads the
    sequence.
    """

    def __init__(self, spec: TokenizerRunSpec, vocab_size: int):
        super().__init__()
        self.spec = spec
        self.encoder, self.quantizer = Encoder(spec), FSQ(spec.levels)
        self.decoder = Decoder(spec, spec.decoder, BACKBONE)
        self.atom_decoder = Decoder(spec, spec.atom_decoder, NUM_ATOMS, vocab_size) if spec.atom_steps else None

    @property
    def num_tokens(self) -> int:
        return self.quantizer.num_codes

    def codes(self, coords_BNAX: Tensor, mask_BN: Tensor) -> Tensor:
        """Return the codes (B, N, F) with the straight-through gradient, for stage 1."""
        return self.quantizer(self.encoder(in_frame(coords_BNAX, mask_BN, self.spec.frame), mask_BN))

    def reconstruct(self, coords_BNAX: Tensor, mask_BN: Tensor) -> Tensor:
        """Return stage 1's backbone (B, N, 3, 3) in Å after the codebook."""
        return self.decoder(self.codes(coords_BNAX, mask_BN), mask_BN)

    @torch.no_grad()
    def encode(self, coords_BNAX: Tensor, mask_BN: Tensor) -> Tensor:
        """Return the tokens (B, N), int64, of N, CA and C in Å.

        They lie in 0 … ``num_tokens`` − 1; −1 marks an invalid residue. A token depends on its residue's position in
        the whole input, so encode a chain exactly as it will be read: other cuts give other tokens.

        Raises:
            ValueError: the shapes do not fit, or a valid residue has non-finite coordinates.
        """
        if (
            coords_BNAX.ndim != 4
            or tuple(coords_BNAX.shape[2:]) != (BACKBONE, 3)
            or mask_BN.shape != coords_BNAX.shape[:2]
        ):
            shapes = f"coords {tuple(coords_BNAX.shape)} and mask {tuple(mask_BN.shape)}"
            raise ValueError(
                f"{shapes}: expected (B, N, 3, 3), N CA C by x y z, and (B, N), True where a residue is valid"
            )
        if not bool(coords_BNAX[mask_BN].isfinite().all()):
            raise ValueError("a residue that the mask calls valid has coordinates that are not finite; mask it out")
        tokens_BN = self.quantizer.indices(self.codes(coords_BNAX, mask_BN))
        return torch.where(mask_BN, tokens_BN, PADDING)

    @torch.no_grad()
    def decode(self, tokens_BN: Tensor) -> Tensor:
        """Return the backbone (B, N, 3, 3) in Å by the light decoder; NaN at token −1."""
        codes_BNF, mask_BN = self._codes_of(tokens_BN)
        return torch.where(mask_BN[..., None, None], self.decoder(codes_BNF, mask_BN), torch.nan)

    @torch.no_grad()
    def decode_atoms(self, tokens_BN: Tensor, sequence_BN: Tensor) -> Tensor:
        """Return the heavy atoms (B, N, 14, 3) in Å by the stage-2 decoder; NaN at token −1.

        All 14 places are predicted; only the sequence determines the existing ones.

        Raises:
            ValueError: the tokenizer was trained without stage 2.
        """
        if self.atom_decoder is None:
            raise ValueError(
                "this tokenizer has no stage 2 (atom_steps=0); train one with atom_steps, or use decode() for the "
                "backbone"
            )
        codes_BNF, mask_BN = self._codes_of(tokens_BN)
        return torch.where(mask_BN[..., None, None], self.atom_decoder(codes_BNF, mask_BN, sequence_BN), torch.nan)

    def _codes_of(self, tokens_BN: Tensor) -> tuple[Tensor, Tensor]:
        mask_BN = tokens_BN != PADDING
        codes_BNF = self.quantizer.codes(torch.where(mask_BN, tokens_BN, 0))
        return codes_BNF.to(self.decoder.to_atoms.weight.dtype), mask_BN


def build_tokenizer(spec: TokenizerRunSpec, vocab_size: int) -> StructureTokenizer:
    """Return an untrained tokenizer on the CPU.

    The same spec gives the same weights. The global random state is unchanged.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return StructureTokenizer(spec, vocab_size)


def directory_of(pool: str | Path, identity: str) -> RunDirectory:
    """Return the folder ``<pool>/tokenizers/<id>``, with the layout of a run's folder."""
    return RunDirectory(Path(pool) / FOLDER, identity)


def load_checkpoint(folder: Path) -> StructureTokenizer:
    """Return the tokenizer of a checkpoint, in eval mode on the CPU.

    Raises:
        ValueError: the folder is no checkpoint of a tokenizer, or a file differs from its manifest.
    """
    manifest = checkpoint.verify_manifest(folder)
    tokenizer = build_tokenizer(
        validate(TokenizerRunSpec, fill_newer_fields(manifest["spec"], TokenizerRunSpec)), manifest["vocab_size"]
    )
    try:
        tokenizer.load_state_dict(load_file(folder / checkpoint.MODEL))
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"{folder / checkpoint.MODEL} does not fit the tokenizer of its own manifest: {line_of(error)}"
        ) from None
    return tokenizer.eval()


def load_tokenizer(pool: str | Path, identity: str) -> StructureTokenizer:
    """Return a finished tokenizer by its id.

    Raises:
        ValueError: it does not exist, is unfinished or diverged, or its checkpoint is damaged.
    """
    directory = directory_of(pool, identity)
    if not directory.spec_file.exists():
        finished = (
            path.name
            for path in directory.path.parent.glob("[0-9a-f]*")
            if RunDirectory(path.parent, path.name).finished
        )
        known = ", ".join(sorted(finished)) or "none yet"
        raise ValueError(
            f"no structure tokenizer {identity} in {directory.path.parent} (there: {known}); train one: python -m "
            "stability.train_tokenizer"
        )
    state = directory.status()["state"]
    if not directory.finished or state == "diverged":
        raise ValueError(
            f"structure tokenizer {identity} is {state}; it can be used once its training has ended with finite numbers"
        )
    folders = directory.checkpoints()
    try:
        if not folders:
            raise ValueError(f"no checkpoint in {directory.path}")
        tokenizer = load_checkpoint(folders[-1])
    except ValueError as error:
        remedy = f"delete {directory.path} and train it again by the command in its provenance.json"
        raise ValueError(f"structure tokenizer {identity} is finished but cannot be read; {remedy}.\n{error}") from None
    if tokenizer_id(tokenizer.spec) != identity:
        raise ValueError(
            f"{folders[-1]} belongs to tokenizer {tokenizer_id(tokenizer.spec)}, not to {identity}; move it away"
        )
    return tokenizer.requires_grad_(False)


MARGIN = 1e-3  # relative distance of the tanh bounds beyond the outermost levels, so that those are reached


class FSQ(nn.Module):
    """Finite scalar quantizer: z (…, F) → codes on a grid in [−1, 1]^F, and their indices.

    The grid has L_1 × … × L_F points, the indices run from 0 to ΠL − 1. Dimension f is bounded by tanh to an interval
    with L_f integers, then rounded. The gradient passes the rounding unchanged (straight-through), so it is that of the
    bound. The index is the mixed-radix number of the digits, least significant dimension first.
    """

    def __init__(self, levels: Sequence[int]):
        super().__init__()
        if not levels or min(levels) < 2:
            raise ValueError(f"levels={list(levels)}: each dimension needs at least 2 levels; e.g. [7,5,5,5,5]")
        self.levels = tuple(levels)
        self.num_codes = math.prod(self.levels)
        levels_F = torch.tensor(self.levels)
        place_F = torch.tensor([math.prod(self.levels[:index]) for index in range(len(self.levels))])
        half_F = (levels_F - 1) * (1 + MARGIN) / 2
        offset_F = torch.where(levels_F % 2 == 0, 0.5, 0.0)  # an even number of integers lies around −1/2
        for name, value in (("levels_F", levels_F), ("place_F", place_F), ("half_F", half_F), ("offset_F", offset_F)):
            self.register_buffer(name, value, persistent=False)
        self.levels_F: Tensor
        self.place_F: Tensor
        self.half_F: Tensor
        self.offset_F: Tensor

    def bound(self, z: Tensor) -> Tensor:
        """Return h·tanh(z + s) − o, inside (−L/2, L/2).

        h is just above (L − 1)/2; o = 1/2 for even L, else 0; s maps 0 to 0.
        """
        shift_F = torch.atanh(self.offset_F / self.half_F)
        return self.half_F * torch.tanh(z + shift_F) - self.offset_F

    def forward(self, z: Tensor) -> Tensor:
        """Return the codes (…, F) in [−1, 1], with the straight-through gradient."""
        bounded = self.bound(z)
        return (bounded + (bounded.round() - bounded).detach()) / (self.levels_F // 2)

    def indices(self, codes: Tensor) -> Tensor:
        """Return the indices (…), int64, of codes (…, F)."""
        half_F = self.levels_F // 2
        return ((codes * half_F).round().long() + half_F).mul(self.place_F).sum(-1)

    def codes(self, indices: Tensor) -> Tensor:
        """Return the codes (…, F) of indices (…), int64.

        Raises:
            ValueError: an index lies outside the codebook.
        """
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < self.num_codes:
            raise ValueError(
                f"structure tokens lie in 0 … {self.num_codes - 1}; got {int(indices.min())} … {int(indices.max())}"
            )
        half_F = self.levels_F // 2
        return (indices[..., None] // self.place_F % self.levels_F - half_F) / half_F
