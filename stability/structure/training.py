"""Training of a structure tokenizer in two stages.

Stage 1 trains encoder, codes and light decoder. Stage 2 freezes them and trains the decoder to all heavy atoms.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stability.build import build_optimizer, resolve_device
from stability.config.tokenizer import TokenizerRunSpec
from stability.config.training import ScheduleSpec
from stability.corpora.proteins.alphabets import VOCAB_SIZE
from stability.corpora.proteins.chain import ProteinChain
from stability.models.backbone import num_parameters
from stability.models.passes import generator_for
from stability.optimizers import lr_factor
from stability.printable import print_text
from stability.runs.directory import RunDirectory
from stability.runs.leftovers import find_leftovers, remove
from stability.runs.lock import LostLock
from stability.structure.crops import FEWEST_RESIDUES, PaddedCrops, first_parts, pad_chains, random_crops
from stability.structure.frames import aligned_squared_error, random_rotations, rotate
from stability.structure.tokenizer import StructureTokenizer, build_tokenizer, load_checkpoint
from stability.training import checkpoint, loop
from stability.training.checkpoint import Checkpoints, Held
from stability.training.machine import prepare_torch

AT_ONCE = 32  # held-out chains


def train_tokenizer(
    spec: TokenizerRunSpec,
    directory: RunDirectory,
    train: Sequence[ProteinChain],
    held_out: Sequence[ProteinChain],
    *,
    device: str = "auto",
) -> Iterator[None]:
    """Train to the verdict, yielding after each optimizer step of either stage.

    A finished tokenizer is left alone. If interrupted and called again, training resumes from the last readable
    checkpoint, bit for bit as if undisturbed (same hardware). Divergence is a verdict.

    Args:
        spec: the tokenizer.
        directory: its folder.
        train: chains to train on.
        held_out: chains to validate on.
        device: "auto", "cpu" or "cuda".

    Raises:
        ValueError: the chains are unusable; nothing is written.
        RuntimeError: the device is missing (nothing is written), or the training crashed (the status is then
            ``failed``, and the traceback is stored).
    """
    if directory.finished:
        return
    trainer = TokenizerTrainer(spec, directory, train, held_out, resolve_device(device))
    directory.write_spec(spec.model_dump(mode="json"), TokenizerRunSpec)
    try:
        for path in find_leftovers(directory.path):  # half-written files of a killed process
            remove(path)
        yield from loop.train(directory, nullcontext(trainer))
    except LostLock:  # another process has the tokenizer now
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        directory.fail(reason, traceback.format_exc(), trainer.num_steps)
        where = f"traceback: {directory.traceback_file}; the same command goes on from the last checkpoint"
        raise RuntimeError(f"tokenizer {directory.run_id} failed: {reason.splitlines()[0]}\n{where}") from error


class TokenizerTrainer(loop.Training):
    """Tokenizer, the current stage's optimizer, and the step counted over both stages."""

    checkpoints: TokenizerCheckpoints
    spec: TokenizerRunSpec

    def __init__(
        self,
        spec: TokenizerRunSpec,
        directory: RunDirectory,
        train: Sequence[ProteinChain],
        held_out: Sequence[ProteinChain],
        device: torch.device,
    ):
        prepare_torch(spec.threads, device)
        self.spec, self.device, self.num_steps = spec, device, spec.steps + spec.atom_steps
        self.checkpoints = TokenizerCheckpoints(spec, directory, VOCAB_SIZE)
        self.train, self.held_out = train, first_parts(held_out, spec.positions)
        self._require_backbones()
        self.tokenizer = build_tokenizer(spec, VOCAB_SIZE).to(device)
        self.val_rmsd = self.init_rmsd = self.atom_rmsd = math.nan
        self._enter_stage()

    def _require_backbones(self) -> None:
        """Raise a ``ValueError`` if no training or no held-out chain has a backbone."""
        has_backbone = any(chain.mask_N.sum() >= FEWEST_RESIDUES for chain in self.train)
        if not has_backbone or not self.held_out:
            side = "held-out chain" if has_backbone else "chain to train on"
            raise ValueError(
                f"data: no {side} has N, CA and C of {FEWEST_RESIDUES} residues or more; a tokenizer needs "
                "backbones, CA traces are not enough"
            )

    def _enter_stage(self) -> None:
        """Choose the stage's parameters and build a fresh optimizer."""
        atoms = self.tokenizer.atom_decoder
        self.in_stage_2 = self.step >= self.spec.steps and atoms is not None
        parts = [atoms] if self.in_stage_2 and atoms is not None else [self.tokenizer.encoder, self.tokenizer.decoder]
        training = nn.ModuleList(parts)
        self.parameters = list(training.parameters())
        self.optimizer = build_optimizer(self.spec, training)

    def first_row(self) -> dict[str, Any]:
        self.init_rmsd = self.val_rmsd = self.rmsd()
        return {"step": 0, "stage": 1, "loss": None, "grad_norm": None, "lr": None, "val_rmsd": self.init_rmsd}

    def restore(self, parameters: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.tokenizer.load_state_dict(parameters)
        self.step, self.init_rmsd, self.val_rmsd, self.atom_rmsd = (
            state[key] for key in ("step", "init_rmsd", "val_rmsd", "atom_rmsd")
        )
        self._enter_stage()
        if state["optimizer"] is not None:
            self.optimizer.load_state_dict(state["optimizer"])

    def state(self) -> tuple[nn.Module, dict[str, Any]]:
        """Return a checkpoint's content; without an optimizer at the end of stage 1."""
        state = {"step": self.step, "init_rmsd": self.init_rmsd, "val_rmsd": self.val_rmsd, "atom_rmsd": self.atom_rmsd}
        optimizer = None if self.step == self.spec.steps else self.optimizer.state_dict()
        return self.tokenizer, state | {"optimizer": optimizer}

    def record_step(self, row: dict[str, Any]) -> None:
        """Validate if a checkpoint is due; enter stage 2 at the end of stage 1."""
        step = row["step"]
        if not math.isfinite(row["loss"]) or not math.isfinite(row["grad_norm"]):
            where = f"at step {step} (stage {row['stage']})"
            self.diverged = f"loss {row['loss']:.3g}, gradient norm {row['grad_norm']:.3g} {where}"
            return
        self.step, self.saves = step, self.checkpoints.is_due(step)
        if self.saves:
            self._validate(row)
        if step == self.spec.steps and not self.in_stage_2:
            self._enter_stage()

    def _validate(self, row: dict[str, Any]) -> None:
        if self.in_stage_2:
            self.atom_rmsd = row["val_atom_rmsd"] = self.rmsd(atoms=True)
        else:
            self.val_rmsd = row["val_rmsd"] = self.rmsd()
        value = self.atom_rmsd if self.in_stage_2 else self.val_rmsd
        if not math.isfinite(value):
            self.diverged = f"held-out RMSD {value} at step {row['step']}"

    def train_step(self, step: int) -> dict[str, Any]:
        """Take one optimizer step of the current stage; return its log row.

        No step is taken if the loss or the gradient is not finite.
        """
        in_stage = step - self.spec.steps if self.in_stage_2 else step
        schedule = ScheduleSpec(name="cosine", warmup_steps=self.spec.warmup_steps)
        lr = self.spec.lr_peak * lr_factor(
            schedule, in_stage, self.spec.atom_steps if self.in_stage_2 else self.spec.steps
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.loss(self.batch(step))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.spec.clip_norm)
        if bool(loss.isfinite() & grad_norm.isfinite()):
            self.optimizer.step()
        stage = 2 if self.in_stage_2 else 1
        return {"step": step, "loss": loss.item(), "grad_norm": grad_norm.item(), "lr": lr, "stage": stage}

    def batch(self, step: int) -> PaddedCrops:
        """Draw randomly rotated crops, determined by seed and step."""
        generator = generator_for(self.spec.seed, "tokenizer", step)
        residues = random_crops(self.train, self.spec.batch, self.spec.positions, generator)
        rotation_BXX = random_rotations(self.spec.batch, generator)
        atoms_BNAX = rotate(residues.atoms_BNAX, rotation_BXX)
        moved = PaddedCrops(
            rotate(residues.coords_BNAX, rotation_BXX),
            residues.mask_BN,
            atoms_BNAX,
            residues.atoms_mask_BNA,
            residues.sequence_BN,
        )
        return moved.to(self.device)

    def loss(self, residues: PaddedCrops) -> Tensor:
        """Return the aligned squared error in Å²: mean over atoms, then over chains."""
        return squared_errors(self.tokenizer, residues, atoms=self.in_stage_2).mean()

    @torch.no_grad()
    def rmsd(self, *, atoms: bool = False) -> float:
        """Return the mean RMSD in Å of the first held-out chains."""
        parts = self.held_out[: self.spec.chains]
        batches = [
            pad_chains(parts[start : start + AT_ONCE]).to(self.device) for start in range(0, len(parts), AT_ONCE)
        ]
        return torch.cat([squared_errors(self.tokenizer, batch, atoms=atoms).sqrt() for batch in batches]).mean().item()

    def judge(self, wall_s: float) -> tuple[str, str, dict[str, Any]]:
        """Judge the tokenizer by its held-out RMSD; it must fall below that of the untrained one.

        Args:
            wall_s: training time in seconds.
        """
        verdict, reason = "stable", ""
        if self.diverged is not None:
            verdict, reason = "diverged", self.diverged
        elif not self.val_rmsd < self.init_rmsd:
            verdict, reason = (
                "plateaued",
                f"held-out RMSD {self.val_rmsd:.2f} Å is not below the untrained {self.init_rmsd:.2f} Å",
            )
        result = {
            "val_rmsd": self.val_rmsd,
            "init_rmsd": self.init_rmsd,
            "val_atom_rmsd": self.atom_rmsd,
            "num_params": num_parameters(self.tokenizer),
        }
        return verdict, reason, {key: value if math.isfinite(value) else None for key, value in result.items()}


class TokenizerCheckpoints(Checkpoints):
    """The checkpoints of a tokenizer: only the newest is kept.

    During training the previous one also stays, as a fallback if the newest is damaged.
    """

    def __init__(self, spec: TokenizerRunSpec, directory: RunDirectory, data_format: int):
        super().__init__(spec, directory, data_format)
        self._every, self._ends = spec.every_steps, (spec.steps, spec.steps + spec.atom_steps)

    def is_due(self, step: int) -> bool:
        return step % self._every == 0 or step in self._ends

    def choose_kept(self, step: int) -> set[int]:
        return {self.newest}

    def read(self, folder: Path) -> Held:
        return load_checkpoint(folder).state_dict(), checkpoint.load_trainer(folder)

    def latest(self, until: float = math.inf, damage: str = "") -> Held | None:
        found = super().latest(until, damage)
        if found is None and self._directory.checkpoints():
            print_text(
                f"{self._directory.run_id}: no checkpoint of it can be read; trains from the beginning", flush=True
            )
        return found


def squared_errors(tokenizer: StructureTokenizer, residues: PaddedCrops, *, atoms: bool) -> Tensor:
    """Return the squared error (B,) in Å² of reconstructed chains.

    Args:
        tokenizer: the tokenizer.
        residues: the chains.
        atoms: False: backbone by the light decoder. True: all present heavy atoms by the stage-2 decoder, codes frozen.
    """
    if not atoms:
        predicted_BNAX = tokenizer.reconstruct(residues.coords_BNAX, residues.mask_BN)
        valid_BM = residues.mask_BN.repeat_interleave(predicted_BNAX.shape[2], 1)
        return aligned_squared_error(predicted_BNAX.flatten(1, 2), residues.coords_BNAX.flatten(1, 2), valid_BM)
    assert tokenizer.atom_decoder is not None
    with torch.no_grad():
        codes_BNF = tokenizer.codes(residues.coords_BNAX, residues.mask_BN)
    predicted_BNAX = tokenizer.atom_decoder(codes_BNF, residues.mask_BN, residues.sequence_BN)
    return aligned_squared_error(
        predicted_BNAX.flatten(1, 2), residues.atoms_BNAX.flatten(1, 2), residues.atoms_mask_BNA.flatten(1)
    )
