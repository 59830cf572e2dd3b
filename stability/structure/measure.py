"""Measure a trained tokenizer on held-out chains, as parquet and mmCIF.

Measured: RMSD beside trivial baselines, use of the codebook, invariance of tokens under rotation. One baseline is a
backbone from the mean internal geometry of the training chains: bond lengths, bond angles and torsions.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from stability.corpora.proteins.chain import ProteinChain
from stability.models.passes import generator_for
from stability.runs.directory import RunDirectory, read_json, replace_folder, write_atomically, write_json
from stability.structure.crops import BACKBONE, PaddedCrops, first_parts, pad_chains
from stability.structure.frames import aligned_squared_error, in_frame, random_rotations, rotate, superpose
from stability.structure.mmcif import mmcif
from stability.structure.tokenizer import StructureTokenizer

SCHEMA = 1
SHIFT_ANGSTROM = 50.0
AT_ONCE = 32


def measure_tokenizer(
    tokenizer: StructureTokenizer,
    directory: RunDirectory,
    train: Sequence[ProteinChain],
    held_out: Sequence[ProteinChain],
    *,
    rotations: int,
    structures: int,
) -> Iterator[None]:
    """Write the tokenizer's results, yielding after each batch of chains.

    Files: ``results/{chains,codes}.parquet``, ``summary.json``, ``example.npz`` and mmCIF. Each held-out chain is
    measured on its first ``positions`` residues. The example is the chain of median RMSD.

    Args:
        tokenizer: the trained tokenizer.
        directory: its folder.
        train: training chains, for the baselines.
        held_out: chains to measure.
        rotations: number of random rotations per chain.
        structures: number of chains to write as mmCIF.
    """
    parts = first_parts(held_out, tokenizer.spec.positions)
    trivial = {
        "ideal_rmsd": torch.from_numpy(ideal_backbone(mean_geometry(train), tokenizer.spec.positions)),
        "mean_rmsd": mean_backbone(train, tokenizer.spec.positions),
        "point_rmsd": torch.zeros(tokenizer.spec.positions, BACKBONE, 3),
    }
    tables, tokens, made = [], [], []
    for start in range(0, len(parts), AT_ONCE):
        own = parts[start : start + AT_ONCE]
        table, own_tokens, backbones = _measure_batch(tokenizer, own, pad_chains(own), trivial, rotations)
        tables.append(table)
        tokens += own_tokens
        made += backbones
        yield
    chains: Any = pd.concat(tables, ignore_index=True)
    codes = np.bincount(np.concatenate(tokens), minlength=tokenizer.num_tokens)
    results = directory.path / "results"
    _write_parquet(results / "chains.parquet", chains.assign(schema=SCHEMA))
    _write_parquet(
        results / "codes.parquet", pd.DataFrame({"token": np.arange(len(codes)), "num": codes, "schema": SCHEMA})
    )
    shown = int((chains.rmsd - chains.rmsd.median()).abs().argmin())
    _write_example(results / "example.npz", parts[shown], made[shown], float(chains.rmsd[shown]))
    if structures:
        with replace_folder(directory.path / "structures") as folder:
            for part in parts[:structures]:
                write_structures(tokenizer, part, folder)
    settings = {"rotations": rotations, "structures": structures, "num_train_chains": len(train)}
    write_json(results / "summary.json", summary(tokenizer, chains, codes) | settings)


def is_measured(directory: RunDirectory, rotations: int, structures: int) -> bool:
    """Return whether the measurement is complete with these settings.

    Args:
        directory: the tokenizer's folder.
        rotations: number of random rotations per chain.
        structures: number of chains written as mmCIF.
    """
    path = directory.path / "results" / "summary.json"  # written last
    found = read_json(path) if path.exists() else {}
    return (found.get("schema"), found.get("rotations"), found.get("structures")) == (SCHEMA, rotations, structures)


def summary(tokenizer: StructureTokenizer, chains: Any, codes: np.ndarray) -> dict[str, Any]:
    """Summarise a tokenizer's chains: means over chains, codes over all residues.

    ``perplexity`` is exp of the entropy of the codes' frequencies.

    Args:
        tokenizer: the trained tokenizer.
        chains: one row per chain.
        codes: number of residues per code, (num_codes,).
    """
    share = codes[codes > 0] / codes.sum()
    same = float((chains.same_tokens * chains.num_residues).sum() / chains.num_residues.sum())
    return {
        "schema": SCHEMA,
        **chains.filter(like="rmsd").dropna(axis=1, how="all").mean().to_dict(),
        "median_rmsd": float(chains.rmsd.median()),
        "same_tokens": same,
        "fewest_same_tokens": float(chains.same_tokens.min()),
        "num_codes": len(codes),
        "used_codes": int((codes > 0).sum()),
        "perplexity": float(np.exp(-(share * np.log(share)).sum())),
        "num_chains": len(chains),
        "num_residues": int(chains.num_residues.sum()),
        "positions": tokenizer.spec.positions,
        "frame": tokenizer.spec.frame,
        "mechanism": tokenizer.spec.mechanism.name,
    }


def mean_backbone(chains: Sequence[ProteinChain], positions: int) -> Tensor:
    """Return the mean position of each residue, (positions, 3, 3) in Å.

    The mean is over the chains' first parts, each aligned to its own principal axes. Residues beyond every chain are at
    the centroid.
    """
    sum_NAX, num_N = torch.zeros(positions, BACKBONE, 3), torch.zeros(positions)
    for start in range(0, len(chains), AT_ONCE):
        parts = first_parts([chains[index] for index in range(start, min(start + AT_ONCE, len(chains)))], positions)
        if parts:
            residues = pad_chains(parts)
            length = residues.mask_BN.shape[1]
            sum_NAX[:length] += in_frame(residues.coords_BNAX, residues.mask_BN, "principal").sum(0)
            num_N[:length] += residues.mask_BN.sum(0)
    return sum_NAX / num_N.clamp_min(1.0)[:, None, None]


@torch.no_grad()
def _measure_batch(
    tokenizer: StructureTokenizer,
    parts: Sequence[ProteinChain],
    residues: PaddedCrops,
    trivial: dict[str, Tensor],
    rotations: int,
) -> tuple[pd.DataFrame, list[np.ndarray], list[np.ndarray]]:
    """Return one row per chain, the chains' tokens, and their reconstructed backbones, superposed."""
    coords_BNAX, mask_BN = residues.coords_BNAX, residues.mask_BN
    valid_BM = mask_BN.repeat_interleave(coords_BNAX.shape[2], 1)
    tokens_BN = tokenizer.encode(coords_BNAX, mask_BN)
    decoded_BMX = tokenizer.decode(tokens_BN).flatten(1, 2)
    goal_BMX = coords_BNAX.flatten(1, 2)
    columns = {
        "chain": [part.id for part in parts],
        "num_residues": mask_BN.sum(1).tolist(),
        "rmsd": _rmsd(decoded_BMX, goal_BMX, valid_BM),
        **{
            name: _rmsd(made_NAX[: mask_BN.shape[1]].flatten(0, 1).expand_as(goal_BMX), goal_BMX, valid_BM)
            for name, made_NAX in trivial.items()
        },
        "atom_rmsd": [float("nan")] * len(parts),
        "same_tokens": same_tokens(tokenizer, parts, residues, tokens_BN, rotations),
    }
    if tokenizer.atom_decoder is not None:
        atoms_BMX = tokenizer.decode_atoms(tokens_BN, residues.sequence_BN).flatten(1, 2)
        columns["atom_rmsd"] = _rmsd(atoms_BMX, residues.atoms_BNAX.flatten(1, 2), residues.atoms_mask_BNA.flatten(1))
    lying_BMX = superpose(decoded_BMX, goal_BMX, valid_BM)
    backbones = [
        row.unflatten(0, (-1, coords_BNAX.shape[2]))[: len(part)].numpy()
        for row, part in zip(lying_BMX, parts, strict=True)
    ]
    return pd.DataFrame(columns), [row[valid].numpy() for row, valid in zip(tokens_BN, mask_BN, strict=True)], backbones


def _rmsd(x_BMX: Tensor, y_BMX: Tensor, valid_BM: Tensor) -> list[float]:
    """Return the RMSD of each chain in Å after superposition, in float64."""
    return aligned_squared_error(x_BMX.double(), y_BMX.double(), valid_BM).sqrt().tolist()


@torch.no_grad()
def same_tokens(
    tokenizer: StructureTokenizer,
    parts: Sequence[ProteinChain],
    residues: PaddedCrops,
    tokens_BN: Tensor,
    rotations: int,
) -> list[float]:
    """Return the share of each chain's valid residues with unchanged tokens under random motion.

    The motion is a random rotation and a shift by tens of Å; the share is a mean over rotations. The draws depend only
    on the chain's id, so that every measurement moves a chain alike.

    Args:
        tokenizer: the trained tokenizer.
        parts: chains, for their ids.
        residues: the same chains, padded.
        tokens_BN: their tokens without motion.
        rotations: number of motions.
    """
    same_B = torch.zeros(len(parts), dtype=torch.float64)
    generators = [generator_for(0, f"turn {hashlib.sha256(part.id.encode()).hexdigest()}") for part in parts]
    for _ in range(rotations):
        rotation_BXX = torch.cat([random_rotations(1, generator) for generator in generators])
        shift_BX = torch.cat([SHIFT_ANGSTROM * torch.randn(1, 3, generator=generator) for generator in generators])
        moved_BNAX = (rotate(residues.coords_BNAX.double(), rotation_BXX) + shift_BX[:, None, None]).float()
        equal_BN = (tokenizer.encode(moved_BNAX, residues.mask_BN) == tokens_BN) & residues.mask_BN
        same_B += equal_BN.sum(1) / residues.mask_BN.sum(1)
    return (same_B / rotations).tolist()


def write_structures(tokenizer: StructureTokenizer, part: ProteinChain, folder: Path) -> list[Path]:
    """Write ``<chain>_original.cif`` and ``<chain>_reconstructed.cif``, superposed.

    The stage-2 decoder gives the heavy atoms; without stage 2 only the backbone is written. An atom14 place is written
    only if the chain has it somewhere: the decoder may be untrained on others.

    Args:
        tokenizer: the trained tokenizer.
        part: the chain.
        folder: folder of the two files.
    """
    residues = pad_chains([part])
    tokens_BN = tokenizer.encode(residues.coords_BNAX, residues.mask_BN)
    has_atoms = tokenizer.atom_decoder is not None
    made_BNAX = tokenizer.decode_atoms(tokens_BN, residues.sequence_BN) if has_atoms else tokenizer.decode(tokens_BN)
    num_atoms = made_BNAX.shape[2]
    valid_BM = residues.atoms_mask_BNA[:, :, :num_atoms].flatten(1)
    lying_BMX = superpose(made_BNAX.flatten(1, 2), residues.atoms_BNAX[:, :, :num_atoms].flatten(1, 2), valid_BM)
    known_A = residues.atoms_mask_BNA[0, :, :num_atoms].any(0).numpy()
    made_NAX = np.where(known_A[:, None], lying_BMX[0].unflatten(0, (-1, num_atoms)).numpy(), np.nan)
    stem = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in part.id)
    paths = [folder / f"{stem}_original.cif", folder / f"{stem}_reconstructed.cif"]
    for path, atoms_NAX in zip(paths, (part.atoms14_NAX, made_NAX), strict=True):
        path.write_text(mmcif(path.stem, part.sequence, atoms_NAX), encoding="utf-8")
    return paths


def _write_example(path: Path, part: ProteinChain, made_NAX: np.ndarray, rmsd: float) -> None:
    buffer = io.BytesIO()
    np.savez(
        buffer, chain=part.id, rmsd=rmsd, mask_N=part.mask_N, original_NAX=part.coords_NAX, reconstructed_NAX=made_NAX
    )
    write_atomically(path, buffer.getvalue())


def _write_parquet(path: Path, table: pd.DataFrame) -> None:
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    write_atomically(path, buffer.getvalue())


LONGEST_BOND = 2.0  # Å: a longer C–N distance is a gap in the chain
PERIOD = 3  # N, CA, C


@dataclass(frozen=True)
class InternalGeometry:
    """Mean internal coordinates, by the kind of atom to place (N, CA, C).

    Attributes:
        lengths_A: distance to the previous atom, Å.
        angles_A: angle at the previous atom, rad.
        torsions_A: torsion about the previous bond, rad.
    """

    lengths_A: np.ndarray
    angles_A: np.ndarray
    torsions_A: np.ndarray


def mean_geometry(chains: Sequence[ProteinChain]) -> InternalGeometry:
    """Compute the mean internal geometry over unbroken quadruples of atoms.

    Lengths and angles have arithmetic means, torsions circular means (C–N–CA–C φ, N–CA–C–N ψ, CA–C–N–CA ω).

    Raises:
        ValueError: no unbroken quadruple exists.
    """
    sums = np.zeros((PERIOD, 5))  # count, length, angle, cos and sin of the torsion
    for chain in chains:
        atoms_MX = chain.coords_NAX.reshape(-1, 3).astype(np.float64)
        four_MKX = np.stack([atoms_MX[k : len(atoms_MX) - 3 + k] for k in range(4)], 1)
        bonds_MK = np.linalg.norm(np.diff(four_MKX, axis=1), axis=-1)
        whole_M = np.isfinite(bonds_MK).all(1) & (np.nan_to_num(bonds_MK, nan=np.inf) < LONGEST_BOND).all(1)
        kind_M = (np.arange(len(four_MKX)) + 3) % PERIOD
        angle_M, torsion_M = _angle(four_MKX[whole_M]), _torsion(four_MKX[whole_M])
        values = np.stack(
            [np.ones(whole_M.sum()), bonds_MK[whole_M, 2], angle_M, np.cos(torsion_M), np.sin(torsion_M)], 1
        )
        np.add.at(sums, kind_M[whole_M], values)
    if not sums[:, 0].all():
        raise ValueError("data: no unbroken piece of backbone among the training chains, so its geometry has no mean")
    means = sums / sums[:, :1]
    return InternalGeometry(means[:, 1], means[:, 2], np.arctan2(means[:, 4], means[:, 3]))


def ideal_backbone(geometry: InternalGeometry, num_residues: int) -> np.ndarray:
    """Return a backbone (num_residues, 3, 3), float64 in Å, built from internal coordinates.

    Atoms are placed one by one (natural extension reference frame, Parsons et al. 2005).
    """
    lengths_A, angles_A, torsions_A = geometry.lengths_A, geometry.angles_A, geometry.torsions_A
    atoms = [np.zeros(3), np.array([lengths_A[1], 0.0, 0.0])]
    turn = np.pi - angles_A[2]
    atoms.append(atoms[1] + lengths_A[2] * np.array([np.cos(turn), np.sin(turn), 0.0]))
    while len(atoms) < PERIOD * num_residues:
        kind = len(atoms) % PERIOD
        along = _unit(atoms[-1] - atoms[-2])
        normal = _unit(np.cross(atoms[-2] - atoms[-3], along))
        frame = np.stack([along, np.cross(normal, along), normal])
        angle, torsion = np.pi - angles_A[kind], torsions_A[kind]
        step = np.array([np.cos(angle), np.sin(angle) * np.cos(torsion), np.sin(angle) * np.sin(torsion)])
        atoms.append(atoms[-1] + lengths_A[kind] * step @ frame)
    return np.array(atoms[: PERIOD * num_residues]).reshape(num_residues, PERIOD, 3)


def _angle(four_MKX: np.ndarray) -> np.ndarray:
    """Return the angle at the third of four atoms, rad."""
    back, forth = _unit(four_MKX[:, 1] - four_MKX[:, 2]), _unit(four_MKX[:, 3] - four_MKX[:, 2])
    return np.arccos(np.clip((back * forth).sum(-1), -1, 1))


def _torsion(four_MKX: np.ndarray) -> np.ndarray:
    """Return the torsion about the bond between atoms 2 and 3, IUPAC sign, rad."""
    first, second, third = (four_MKX[:, k + 1] - four_MKX[:, k] for k in range(3))
    n1, n2 = np.cross(first, second), np.cross(second, third)
    return np.arctan2((np.cross(n1, n2) * _unit(second)).sum(-1), (n1 * n2).sum(-1))


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)
