"""One loop for every objective: a generator that trains a run step by step, and can be left and resumed after any of them."""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stability.build import build_model, build_objective, build_optimizer, resolve_device
from stability.config import RunSpec, run_id
from stability.data._base import Corpus
from stability.data._cache import load
from stability.models.backbone import num_parameters
from stability.objectives._base import Examples
from stability.runs.directory import RunDirectory, read_jsonl, write_json
from stability.runs.log import RunLog
from stability.runs.provenance import provenance
from stability.training import checkpoint
from stability.training.evaluate import Validation
from stability.training.schedule import lr_factor
from stability.training.seeds import generator_for
from stability.training.verdict import SpikeWatch, judge


def train(
    spec: RunSpec, directory: RunDirectory, *, cache_dir: Path, device: str = "auto", wandb: dict[str, Any] | None = None, command: str = ""
) -> Iterator[None]:
    """Train a run to its verdict, yielding after every optimizer step. A finished run is left alone.

    Closing the generator writes a checkpoint at the step it stands at; called again it goes on from the last checkpoint that can be read,
    bit for bit as if it had never stopped (same hardware). Divergence is a result, not an error.
    """
    if directory.finished:
        return
    trainer = Trainer(spec, directory, load(cache_dir, spec.data_fingerprint), resolve_device(device))
    trainer.open(wandb, command)
    summary: dict[str, Any] = {}
    try:
        while trainer.step < spec.steps and trainer.diverged is None:
            trainer.advance()
            yield
        summary = trainer.finish()
    except GeneratorExit:
        if trainer.diverged is None:  # else the parameters may hold what diverged; the resumed run finds it again
            trainer.save()
        raise
    finally:
        trainer.log.close(summary)


def training_examples(spec: RunSpec, corpus: Corpus, objective: Any, purpose: str, index: int, *, seed: int, batch: int) -> Examples:
    """Batch number ``index`` of a purpose ("train", "curvature"): windows and masks depend on nothing else."""
    generator = generator_for(seed, purpose, index)
    tokens_BN = corpus.batch("train", batch, objective.tokens_needed(spec.model.positions), generator)
    return objective.examples(tokens_BN, generator)


class Trainer:
    """The state of one run: model, optimizer, spike watch, step; and how one step changes it."""

    def __init__(self, spec: RunSpec, directory: RunDirectory, corpus: Corpus, device: torch.device):
        prepare_torch(spec.threads, device)
        self.spec, self.directory, self.corpus, self.device = spec, directory, corpus, device
        self.objective = build_objective(spec, corpus.vocab_size)
        self.model = build_model(spec, corpus.vocab_size).to(device)
        self.optimizer = build_optimizer(spec, self.model)
        self.parameters = list(self.model.parameters())
        self.validation = Validation(spec, corpus, self.objective, device)
        self.watch = SpikeWatch(spec.verdict)
        self.step = 0
        self.diverged: str | None = None
        self.val_nll = self.init_nll = math.nan

    def open(self, wandb: dict[str, Any] | None, command: str) -> None:
        """Claim the directory, resume from the last readable checkpoint, and say that the run is running."""
        self.directory.write_spec(self.spec.model_dump(mode="json"))
        description = {"description": self.corpus.described(self.spec.model.positions), "fingerprint": self.corpus.fingerprint}
        write_json(self.directory.provenance_file, {**provenance(command), "data": description, "device": str(self.device), "threads": self.spec.threads})
        self._resume()
        self.log = RunLog(self.directory, resume_after=self.step if self.step else -1, wandb=wandb)
        timings = list(read_jsonl(self.directory.timing_file))
        self._started = time.perf_counter() - (timings[-1]["wall_s"] if timings else 0.0)
        self.directory.set_status("running", step=self.step, num_steps=self.spec.steps, phase="training")
        if self.step == 0:
            self.init_nll = self.val_nll = self.validation.nll(self.model)
            self.log.metrics(_row(step=0, val_nll=self.init_nll))

    def _resume(self) -> None:
        for folder in reversed(self.directory.checkpoints()):
            try:
                spec, model = checkpoint.load(folder)
                if run_id(spec) != self.directory.run_id:
                    raise ValueError(f"{folder} belongs to run {run_id(spec)}")
                state = checkpoint.load_trainer(folder)
            except ValueError as error:
                print(f"{self.directory.run_id}: skips a damaged checkpoint ({error})", flush=True)
                continue
            self.model.load_state_dict(model.state_dict())
            self.optimizer.load_state_dict(state["optimizer"])
            self.watch.restore(state["watch"])
            self.step, self.init_nll, self.val_nll = state["step"], state["init_nll"], state["val_nll"]
            return

    def save(self) -> None:
        """A checkpoint of the current step; one that only an interruption left behind goes once a later one stands."""
        state = {"step": self.step, "init_nll": self.init_nll, "val_nll": self.val_nll, "watch": self.watch.state()}
        folder = self.directory.path / "checkpoints" / f"step_{self.step:06d}"
        if self.step == 0 or folder in self.directory.checkpoints():
            return
        checkpoint.save(folder, self.model, {**state, "optimizer": self.optimizer.state_dict()}, self.spec, step=self.step, vocab_size=self.corpus.vocab_size)
        self._remove_unplanned(but=folder)

    def _remove_unplanned(self, but: Path | None = None) -> None:
        """What only an interruption wrote goes once it has served, so that a resumed run's folder is that of an undisturbed one."""
        for folder in self.directory.checkpoints():
            if folder != but and int(folder.name.removeprefix("step_")) not in planned_checkpoints(self.spec):
                checkpoint.remove(folder)

    def advance(self) -> None:
        """One optimizer step, its log rows, and the validation and checkpoint that fall on it."""
        step, spec = self.step + 1, self.spec
        started = time.perf_counter()
        row = self.update(step)
        self.diverged = first_non_finite(row, step)
        if self.diverged is None:
            self.step = step
            self.watch.update(step, row["loss"])
            if step % spec.evaluation.every_steps == 0 or step == spec.steps:
                self.val_nll = row["val_nll"] = self.validation.nll(self.model)
                self.diverged = first_non_finite({"validation NLL": self.val_nll}, step)
        self.log.metrics(_row(**{key: value if value is None or math.isfinite(value) else None for key, value in row.items()}))
        now = time.perf_counter()
        tokens = spec.batch * spec.model.positions
        self.log.timing({"step": step, "wall_s": now - self._started, "tokens_per_s": tokens / (now - started), "memory_mb": peak_memory_mb(self.device)})
        if self.diverged is None and step in planned_checkpoints(spec):
            self.save()

    def update(self, step: int) -> dict[str, Any]:
        """Gradient, clipping and optimizer step number ``step``; the log row of it. No step is taken where loss or gradient is not finite."""
        spec = self.spec
        lr = spec.lr_peak * lr_factor(spec.schedule, step, spec.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        examples = training_examples(spec, self.corpus, self.objective, "train", step, seed=spec.seed, batch=spec.batch).to(self.device)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._backward(examples)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, spec.clip_norm)
        row = {"step": step, "loss": loss.item(), "grad_norm": grad_norm.item(), "update_norm": 0.0, "lr": lr}
        if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
            return row
        before = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer.step()
        moved = [after.detach() - start for after, start in zip(self.parameters, before, strict=True)]
        row["update_norm"] = torch.nn.utils.get_total_norm(moved).item()
        return row

    def _backward(self, examples: Examples) -> Tensor:
        """The batch's mean loss, its gradient added to the parameters'. Microbatch by microbatch, each of them over the count of the whole batch: one of
        few masked tokens weighs no more than they do."""
        count = self.objective.count(examples, torch.float32)
        totals = []
        for part in examples.split(self.spec.microbatch or self.spec.batch):
            total, _ = self.objective.loss(self.model, part)
            (total / count).backward()
            totals.append(total.detach())
        return torch.stack(totals).sum() / count

    def finish(self) -> dict[str, Any]:
        """Write verdict and result, the last thing that training writes; returned as a summary."""
        unigram_nll = self.validation.unigram_nll(self.corpus.log_frequencies())
        if self.diverged is not None:
            verdict, reason, val_nll = "diverged", self.diverged, None
        else:
            verdict, reason = judge(self.val_nll, self.init_nll, unigram_nll, self.watch)
            val_nll = self.val_nll
        result = {
            "val_nll": val_nll,
            "init_nll": self.init_nll,
            "unigram_nll": unigram_nll,
            "num_params": num_parameters(self.model),
            "num_tokens": self.step * self.spec.batch * self.spec.model.positions,
            "wall_s": time.perf_counter() - self._started,
        }
        self._remove_unplanned()
        self.directory.set_status(verdict, step=self.step, reason=reason, num_steps=self.spec.steps, result=result)
        return {"verdict": verdict, "reason": reason, **result}


def planned_checkpoints(spec: RunSpec) -> set[int]:
    """Steps whose checkpoints stay: the first evaluation, the last step, and the extra cadence."""
    every = spec.checkpoint.every_steps
    return {min(spec.evaluation.every_steps, spec.steps), spec.steps, *(range(every, spec.steps, every) if every else ())}


def first_non_finite(values: dict[str, Any], step: int) -> str | None:
    """``"loss is nan at step 37"`` for the first value that is not finite, else None."""
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            return f"{name.replace('_', ' ')} is {value} at step {step}"
    return None


def prepare_torch(threads: int, device: torch.device) -> None:
    """Global state that one trial must not inherit from another: threads, default dtype, deterministic kernels on CUDA."""
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with a fixed workspace
    torch.use_deterministic_algorithms(device.type == "cuda", warn_only=True)


def peak_memory_mb(device: torch.device) -> float:
    """Peak of the CUDA allocator, or of this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _row(**values: Any) -> dict[str, Any]:
    return {**dict.fromkeys(("step", "loss", "grad_norm", "update_norm", "lr", "val_nll")), **values}
