"""Samples of a run's checkpoints, and their NLL under an oracle → ``samples/<phase>.jsonl`` and ``generation/<phase>.parquet`` in the run's folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from stability.build import build_objective, resolve_device
from stability.config import RunSpec, parse_run
from stability.data._base import Corpus
from stability.objectives._base import AbstractObjective
from stability.parts import num_context_of
from stability.probes import samples as stored_samples
from stability.probes.alpha_max import corpus_of, phases
from stability.probes.oracle import key_of, load_oracle, weights_sha256
from stability.probes.samplers import Draws, NonFinite, left_to_right, reverse_diffusion, unmask
from stability.probes.samples import Sample
from stability.registry import Registry
from stability.runs.directory import RunDirectory, read_json, step_of
from stability.runs.results import GENERATION_COLUMNS, PROTOCOL
from stability.runs.tables import read_metadata, write_parquet
from stability.sampling import STEPPED, GenerationSpec
from stability.training import checkpoint
from stability.training.machine import prepare_torch
from stability.training.seeds import generator_for


def missing_phases(directory: RunDirectory, spec: GenerationSpec, phase: str = "terminal") -> list[str]:
    """The phases asked for (terminal, earliest, all) that have a checkpoint, and lack samples or their scores under the same settings."""
    return [name for name, folder in phases(directory, phase).items() if not is_done(directory, folder, name, spec)]


def is_generated(directory: RunDirectory, spec: GenerationSpec) -> bool:
    return not missing_phases(directory, spec)


def is_done(directory: RunDirectory, folder: Path, phase: str, spec: GenerationSpec) -> bool:
    """Whether a checkpoint's samples, and their scores where an oracle is asked for, are on disk under the same settings."""
    if not _is_sampled(directory, folder, phase, spec):
        return False
    file = directory.generation_file(phase)
    return spec.oracle is None or (file.exists() and read_metadata(file).get(PROTOCOL) == _scored_by(folder, spec))


def check_kept(directories: Iterable[RunDirectory], spec: GenerationSpec, phase: str = "terminal") -> None:
    """Errors: ``ValueError`` of two lines where `generate` would replace finished samples or scores, unless ``overwrite`` says so.

    Samples (and their scores) of a checkpoint whose weights have changed since are no such case: they are of no checkpoint that is there.
    """
    kept = [
        (directory, name, found)
        for directory in directories
        for name, folder in phases(directory, phase).items()
        if (found := replaced(directory, folder, name, spec)) is not None
    ]
    refuse_to_replace(kept, spec)


def refuse_to_replace(kept: Sequence[tuple[RunDirectory, str, str]], spec: GenerationSpec) -> None:
    """Errors: as `check_kept`. ``kept``: directory, phase and what `replaced` says of it."""
    if not kept or spec.overwrite:
        return
    directory, phase, found = kept[0]
    more = f" (and {len(kept) - 1} more)" if len(kept) > 1 else ""
    raise ValueError(
        f"{directory.run_id} has {found} of its {phase} checkpoint{more}, which these settings would replace;\n"
        "overwrite=true replaces them (in a sweep generate.overwrite=true); the same settings again leave them as they are"
    )


def replaced(directory: RunDirectory, folder: Path, phase: str, spec: GenerationSpec) -> str | None:
    """What of a checkpoint's finished samples and scores `generate_checkpoint` would replace by others, in words; None: nothing."""
    meta, made_by = stored_samples.stored(directory, phase), _made_by(folder, spec)
    if meta is None or meta.get("checkpoint") != made_by["checkpoint"]:
        return None
    if not _is_sampled(directory, folder, phase, spec):
        different = [key for key in {**made_by, **meta} if key != "reason" and meta.get(key) != made_by.get(key)]
        return f"finished samples with {', '.join(f'{key}={meta.get(key)} (asked for: {made_by.get(key)})' for key in different)}"
    file = directory.generation_file(phase)
    if spec.oracle is None or not file.exists() or read_metadata(file).get(PROTOCOL) == _scored_by(folder, spec):
        return None
    oracles = pd.read_parquet(file, columns=["oracle"]).oracle
    return f"scores of another oracle ({oracles.iloc[0] if len(oracles) else 'of no sample'}; asked for: {spec.oracle})"


def _is_sampled(directory: RunDirectory, folder: Path, phase: str, spec: GenerationSpec) -> bool:
    meta = stored_samples.stored(directory, phase)
    return meta is not None and {key: value for key, value in meta.items() if key != "reason"} == _made_by(folder, spec)


def _made_by(folder: Path, spec: GenerationSpec) -> dict[str, Any]:
    """What samples depend on (of the batch, no more than by rounding), with the sampler that ``auto`` stands for."""
    run = parse_run(read_json(folder / checkpoint.MANIFEST)["spec"])
    sampler = resolved_sampler(run, spec)
    steps = {"steps": spec.steps or run.model.positions} if sampler in STEPPED else {}
    values = {"num": spec.num, "sampler": sampler, "temperature": spec.temperature, "seed": spec.seed, **steps}
    return {**values, "positions": run.model.positions, "checkpoint": weights_sha256(folder)[:12], "step": step_of(folder)}


def _scored_by(folder: Path, spec: GenerationSpec) -> str:
    assert spec.oracle is not None
    return json.dumps({**_made_by(folder, spec), "oracle": key_of(spec.oracle)}, sort_keys=True)


def resolved_sampler(run: RunSpec, spec: GenerationSpec) -> str:
    """The sampler of a run. Errors: ``ValueError`` where the run's objective has no use for the one that was asked for."""
    family = Registry("objectives").load(run.objective.name)
    fitting = _fitting(build_objective(run, family.any_format(run.model.positions)))
    if not fitting:
        raise ValueError(f"objective={run.objective.name} predicts nothing that could be sampled; leave generate out (generate.num=null)")
    if spec.sampler == "auto":
        if spec.steps is not None and fitting[0] not in STEPPED:
            raise ValueError(
                f"steps={spec.steps} belongs to sampler=euler and sampler=analytic; sampler=auto is {fitting[0]} here, which fills one position a step"
            )
        return fitting[0]
    if spec.sampler not in fitting:
        raise ValueError(f"sampler={spec.sampler} does not fit objective={run.objective.name}; these do: {', '.join(fitting)}")
    return spec.sampler


def _fitting(objective: AbstractObjective) -> tuple[str, ...]:
    """Samplers for an objective, its default first."""
    if objective.direction == "causal":
        return ("ar",)
    diffusion = ("analytic", "euler") if hasattr(objective, "log_score") else ()
    return diffusion if objective.mask_id is None else ("top_prob", "random", *diffusion)


def generate(directory: RunDirectory, spec: GenerationSpec, *, cache_dir: Path, device: str = "auto", phase: str = "terminal") -> Iterator[None]:
    """Sample and score what is missing, yielding after every step of a sampler and every scored batch. A run without a checkpoint has nothing to sample."""
    for name in missing_phases(directory, spec, phase):
        yield from generate_checkpoint(directory, phases(directory, name)[name], name, spec, cache_dir=cache_dir, device=device)


def generate_checkpoint(directory: RunDirectory, folder: Path, phase: str, spec: GenerationSpec, *, cache_dir: Path, device: str = "auto") -> Iterator[None]:
    """One checkpoint folder under a phase's name. Samples are written whole or not at all, then their scores; what is there already is not made again."""
    run, model = checkpoint.load(folder)
    corpus = corpus_of(run, cache_dir)
    oracle = None if spec.oracle is None else load_oracle(spec.oracle, corpus, device)  # before an hour of sampling, not after it
    if not _is_sampled(directory, folder, phase, spec):
        directory.generation_file(phase).unlink(missing_ok=True)  # scores of other samples
        yield from _sample(directory, run, model, phase, spec, corpus, resolve_device(device), _made_by(folder, spec))
    if oracle is None:
        return
    found, rows = stored_samples.read(directory, phase, corpus), []
    has_bytes = corpus.vocabulary is None or corpus.vocabulary.unknown is None  # an unknown token stands for no number of bytes
    for scores in oracle.score(found, spec.batch):
        rows += [_row(score.nats, score.num_tokens, score.num_bytes if has_bytes else 0) for score in scores]
        yield
    labels = {"run_id": directory.run_id, "phase": phase, "oracle": oracle.name, "oracle_sha256": oracle.sha256, **_shown(folder, spec)}
    table = pd.DataFrame([{**labels, "sample": index, **row} for index, row in enumerate(rows)], columns=GENERATION_COLUMNS)
    write_parquet(table, directory.generation_file(phase), {PROTOCOL: _scored_by(folder, spec)})


def _shown(folder: Path, spec: GenerationSpec) -> dict[str, Any]:
    made_by = _made_by(folder, spec)
    return {key: made_by.get(key) for key in ("sampler", "steps", "temperature", "seed")}


def _row(nats: float, num_tokens: int, num_bytes: int) -> dict[str, Any]:
    """``num_bytes`` 0: not known, and neither are the nats per byte."""
    nll = nats / num_tokens if num_tokens else math.nan
    return {"nll": nll, "nll_per_byte": nats / num_bytes if num_bytes else math.nan, "num_tokens": num_tokens, "num_bytes": num_bytes}


def _sample(
    directory: RunDirectory, run: RunSpec, model: nn.Module, phase: str, spec: GenerationSpec, corpus: Corpus, device: torch.device, made_by: dict[str, Any]
) -> Iterator[None]:
    prepare_torch(run.threads, device)
    source = Source(run, model.to(device), corpus, spec, device)
    found: list[Sample] = []
    reason: dict[str, Any] = {}
    try:
        for start in range(0, spec.num, spec.batch):
            tokens_BN = source.start(range(start, min(start + spec.batch, spec.num)))
            yield from source.steps(tokens_BN)
            found += [stored_samples.decoded(corpus, row) for row in tokens_BN.tolist()]
    except NonFinite as error:
        found, reason = [], {"reason": str(error)}  # a result of training, not a crash
    fasta = stored_samples.is_nucleotides(corpus)
    stored_samples.write(directory, phase, found, {**made_by, **reason}, fasta=fasta)


class Source:
    """A model as a sampler sees it. Sample i comes from its own random numbers: seed, i."""

    def __init__(self, run: RunSpec, model: nn.Module, corpus: Corpus, spec: GenerationSpec, device: torch.device):
        self.run, self.model, self.corpus, self.spec, self.device = run, model, corpus, spec, device
        self.objective: Any = build_objective(run, corpus.vocab_size)
        self.sampler = resolved_sampler(run, spec)

    def start(self, indices: Sequence[int]) -> Tensor:
        """Sequences of noise (B, N): masks; or, for a uniform graph, any tokens. For ar zeros after the first token, which is a token of the training text."""
        self.draws = Draws([generator_for(self.spec.seed, "generate", index) for index in indices], self.device)
        self.context = self._context(indices)
        shape = (len(indices), self.run.model.positions)
        if self.objective.mask_id is not None:
            return torch.full(shape, self.objective.mask_id, device=self.device)
        if self.sampler != "ar":
            return (self.draws.uniforms(shape[1]) * self.corpus.vocab_size).long()
        tokens_BN = torch.zeros(shape, dtype=torch.int64, device=self.device)
        places = (self.draws.uniforms() * len(self.corpus.train_tokens)).long().cpu().numpy()
        tokens_BN[:, 0] = torch.as_tensor(self.corpus.train_tokens[places].astype("int64"), device=self.device)
        return tokens_BN

    def _context(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """What the model's cross mechanism reads: the starts of held-out windows, sample i that of window i (from the front again where there are fewer)."""
        num_context = Registry("objectives").load(self.run.objective.name).num_context(self.run.objective.settings)
        if not num_context:
            return {}
        windows = self.corpus.windows("val", self.spec.num, num_context)
        return {"context_BJ": windows[[index % len(windows) for index in indices]].to(self.device)}

    def steps(self, tokens_BN: Tensor) -> Iterator[None]:
        """Turn the noise into a sample, in place."""
        read: Any = partial(self.model, **self.context)
        temperature = self.spec.temperature
        if self.sampler == "ar":
            return left_to_right(self._next(read), tokens_BN, self.draws, temperature=temperature)
        if self.sampler == "top_prob" or self.sampler == "random":
            clean = partial(self.objective.clean_probs, read)
            return unmask(clean, tokens_BN, self.objective.mask_id, self.draws, order=self.sampler, temperature=temperature)
        graph = "uniform" if self.objective.mask_id is None else "absorbing"
        scheme, steps = ("euler" if self.sampler == "euler" else "analytic"), self.spec.steps or self.run.model.positions
        noise = self.objective.noise
        return reverse_diffusion(self._scores(read), noise, graph, tokens_BN, self.draws, scheme=scheme, steps=steps, temperature=temperature)

    def _next(self, read: Any) -> Callable[[Tensor], Tensor]:
        def next_probs(tokens_BN: Tensor) -> Tensor:
            with torch.no_grad():
                return read(tokens_BN)[:, -1].double().softmax(-1)

        return next_probs

    def _scores(self, read: Any) -> Callable[[Tensor, Tensor], Tensor]:
        def scores(tokens_BN: Tensor, sigma: Tensor) -> Tensor:
            sigma_B = sigma.float().expand(len(tokens_BN))
            return self.objective.log_score(read, tokens_BN, sigma_B).double().exp()

        return scores


def are_alike(run: RunSpec, spec: GenerationSpec) -> bool:
    """Whether nothing tells one sample from another: all masks to begin with, always the surest position and its likeliest token, and no context."""
    chance = spec.temperature > 0 or resolved_sampler(run, spec) != "top_prob"
    return spec.num > 1 and not chance and not num_context_of(run.objective)


def num_steps(directory: RunDirectory, spec: GenerationSpec, phase: str) -> int:
    """How often `generate` yields on the missing phases: steps of the sampler by batches, and scored batches."""
    run = parse_run(read_json(directory.spec_file))
    return len(missing_phases(directory, spec, phase)) * steps_of_a_phase(run, spec)


def steps_of_a_phase(run: RunSpec, spec: GenerationSpec) -> int:
    sampler = resolved_sampler(run, spec)
    per_batch = {"ar": run.model.positions - 1}.get(sampler, run.model.positions)
    per_batch = (spec.steps or run.model.positions) + 1 if sampler in STEPPED else per_batch
    return math.ceil(spec.num / spec.batch) * (per_batch + (spec.oracle is not None))
