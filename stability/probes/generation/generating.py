"""Sample a run's checkpoints and score the samples' NLL by an oracle.

Written to ``samples/<phase>.jsonl`` and ``generation/<phase>.parquet`` in the run's folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stability.build import build_objective, resolve_device
from stability.config.generation import GenerationSpec
from stability.config.parse import parse_run
from stability.config.run import RunSpec
from stability.probes.checkpoints import corpus_of
from stability.probes.generation import samples as stored_samples
from stability.probes.generation.kinds import kind_of
from stability.probes.generation.samplers import NonFinite
from stability.probes.generation.text_oracle import key_of, weights_sha256
from stability.probes.stored import Stored
from stability.registry import Registry
from stability.runs.directory import RunDirectory, step_of
from stability.runs.parquet import read_table
from stability.runs.phases import phases
from stability.training import checkpoint
from stability.training.machine import prepare_torch


def list_missing_phases(directory: RunDirectory, spec: GenerationSpec, phase: str = "terminal") -> list[str]:
    """Return the requested phases with a checkpoint but missing samples or scores.

    Samples and scores count only under the same settings.

    Args:
        directory: the run.
        spec: the generation settings.
        phase: terminal, earliest, last or all.
    """
    return [name for name, folder in phases(directory, phase).items() if not is_done(directory, folder, name, spec)]


def is_generated(directory: RunDirectory, spec: GenerationSpec) -> bool:
    return not list_missing_phases(directory, spec)


def is_done(directory: RunDirectory, folder: Path, phase: str, spec: GenerationSpec) -> bool:
    """Return whether a checkpoint's samples, and scores if requested, are stored.

    Both count only under the same settings.

    Args:
        directory: the run.
        folder: the checkpoint.
        phase: its phase.
        spec: the generation settings.
    """
    if not _is_sampled(directory, folder, phase, spec):
        return False
    return spec.oracle is None or _scores(directory, folder, phase, spec).is_current()


def check_kept(directories: Iterable[RunDirectory], spec: GenerationSpec, phase: str = "terminal") -> None:
    """Refuse to let `generate` replace finished samples or scores without ``overwrite``.

    Samples of a checkpoint with changed weights may be replaced: no existing checkpoint made them.

    Args:
        directories: the runs.
        spec: the generation settings.
        phase: terminal, earliest, last or all.

    Raises:
        ValueError: something would be replaced; two lines.
    """
    kept = [
        (directory, name, found)
        for directory in directories
        for name, folder in phases(directory, phase).items()
        if (found := describe_replaced(directory, folder, name, spec)) is not None
    ]
    refuse_to_replace(kept, spec)


def refuse_to_replace(kept: Sequence[tuple[RunDirectory, str, str]], spec: GenerationSpec) -> None:
    """Raise the error of `check_kept` if anything would be replaced.

    ``kept`` has directory, phase and the description from `describe_replaced`.
    """
    if not kept or spec.overwrite:
        return
    directory, phase, found = kept[0]
    more = f" (and {len(kept) - 1} more)" if len(kept) > 1 else ""
    raise ValueError(
        f"{directory.run_id} has {found} of its {phase} checkpoint{more}, which these settings would "
        "replace;\noverwrite=true replaces them (in a sweep generate.overwrite=true); the same settings again leave "
        "them as they are"
    )


def describe_replaced(directory: RunDirectory, folder: Path, phase: str, spec: GenerationSpec) -> str | None:
    """Describe the samples or scores to be replaced by `generate_checkpoint`, or None.

    Args:
        directory: the run.
        folder: the checkpoint.
        phase: its phase.
        spec: the generation settings.
    """
    meta, made_by = stored_samples.read_settings(directory, phase), _collect_sample_settings(folder, spec)
    if meta is None or meta.get("checkpoint") != made_by["checkpoint"]:
        return None
    if not _is_sampled(directory, folder, phase, spec):
        return f"finished samples with {_differences({**meta, 'reason': None}, {**made_by, 'reason': None})}"
    if spec.oracle is None:
        return None
    scores = _scores(directory, folder, phase, spec)
    if not scores.path.exists() or scores.is_current():
        return None
    before, asked = json.loads(scores.read_protocol() or "{}"), json.loads(scores.protocol)
    if before.get("oracle") == asked["oracle"]:
        return f"scores with {_differences(before, asked)}"
    oracles = read_table(scores.path, ["oracle"]).to_pandas().oracle
    return f"scores of another oracle ({oracles.iloc[0] if len(oracles) else 'of no sample'}; asked for: {spec.oracle})"


def _differences(before: dict[str, Any], asked: dict[str, Any]) -> str:
    different = [key for key in {**asked, **before} if before.get(key) != asked.get(key)]
    return ", ".join(f"{key}={before.get(key)} (asked for: {asked.get(key)})" for key in different)


def _is_sampled(directory: RunDirectory, folder: Path, phase: str, spec: GenerationSpec) -> bool:
    meta = stored_samples.read_settings(directory, phase)
    return meta is not None and {
        key: value for key, value in meta.items() if key != "reason"
    } == _collect_sample_settings(folder, spec)


def _collect_sample_settings(folder: Path, spec: GenerationSpec) -> dict[str, Any]:
    """Return the settings behind the samples, with ``auto`` resolved."""
    run = parse_run(checkpoint.manifest_of(folder)["spec"], folder)
    sampler = resolve_sampler(run, spec)
    steps = {"steps": spec.steps or run.model.positions} if sampler in _list_stepped(run) else {}
    # without the batch size: it changes samples only by rounding
    values = {
        "num": spec.num,
        "sampler": sampler,
        "temperature": spec.temperature,
        "seed": spec.seed,
        **steps,
        **kind_of(run).collect_sample_settings(spec),
    }
    return {
        **values,
        "positions": run.model.positions,
        "checkpoint": weights_sha256(folder)[:12],
        "step": step_of(folder),
    }


def _scores(directory: RunDirectory, folder: Path, phase: str, spec: GenerationSpec) -> Stored:
    return Stored(directory.generation_file(phase), _encode_score_settings(folder, spec))


def _encode_score_settings(folder: Path, spec: GenerationSpec) -> str:
    assert spec.oracle is not None
    run = parse_run(checkpoint.manifest_of(folder)["spec"], folder)
    return json.dumps(
        {
            **_collect_sample_settings(folder, spec),
            "oracle": key_of(spec.oracle),
            **kind_of(run).collect_score_settings(spec),
        },
        sort_keys=True,
    )


def resolve_sampler(run: RunSpec, spec: GenerationSpec) -> str:
    """Return a run's sampler.

    Raises:
        ValueError: the sampler or another setting does not fit the run's objective.
    """
    family = Registry("objectives").load(run.objective.name)
    fitting = build_objective(run, family.any_format(run.model.positions)).samplers
    if not fitting:
        raise ValueError(
            f"objective={run.objective.name} predicts nothing that could be sampled; leave generate out "
            "(generate.num=null)"
        )
    _refuse_unread(run, spec)
    kind_of(run).check(run, spec)
    if spec.sampler not in ("auto", *fitting):
        raise ValueError(
            f"sampler={spec.sampler} does not fit objective={run.objective.name}; these do: {', '.join(fitting)}"
        )
    sampler = fitting[0] if spec.sampler == "auto" else spec.sampler
    if spec.steps is not None and sampler not in _list_stepped(run):
        registry = Registry("objectives")
        owners = dict.fromkeys(name for each in registry.names() for name in registry.load(each).stepped)
        how = f"auto is {sampler} here, which" if spec.sampler == "auto" else sampler
        raise ValueError(
            f"steps={spec.steps} belongs to {' and '.join(f'sampler={name}' for name in owners)}; sampler={how} fills "
            "one position a step"
        )
    return sampler


def _list_stepped(run: RunSpec) -> tuple[str, ...]:
    """Return a run's possible samplers with a ``steps`` setting."""
    return Registry("objectives").load(run.objective.name).stepped


def _refuse_unread(run: RunSpec, spec: GenerationSpec) -> None:
    """Raise a one-line ``ValueError`` for a setting of another kind of samples."""
    registry, read = Registry("objectives"), Registry("objectives").load(run.objective.name).Sampling.model_fields
    for name, field in type(spec.own).model_fields.items():
        if name not in read and (value := getattr(spec.own, name)) != field.default:
            owner = next(each for each in registry.names() if name in registry.load(each).Sampling.model_fields)
            raise ValueError(
                f"{name}={value} belongs to samples of {registry.load(owner).corpus_kind} (objective={owner}); "
                f"objective={run.objective.name} has no use for it"
            )


def check_oracle(run: RunSpec, spec: GenerationSpec, corpus: Any) -> None:
    """Check that ``spec.oracle`` exists and can score a run's samples; nothing stays in memory.

    Args:
        run: the run's spec.
        spec: the generation settings.
        corpus: the run's prepared data.

    Raises:
        ValueError: no such oracle, or unsuitable; two lines.
    """
    kind_of(run).oracle(run, spec, corpus, "cpu")
    kind_of(run).forget_oracle()


def generate(
    directory: RunDirectory, spec: GenerationSpec, *, cache_dir: Path, device: str = "auto", phase: str = "terminal"
) -> Iterator[None]:
    """Sample and score the missing phases; yield after every sampler step and scored batch.

    A run without a checkpoint has no samples.

    Args:
        directory: the run.
        spec: the generation settings.
        cache_dir: folder with the prepared data.
        device: "auto", or a torch device.
        phase: terminal, earliest, last or all.
    """
    for name in list_missing_phases(directory, spec, phase):
        yield from generate_checkpoint(
            directory, phases(directory, name)[name], name, spec, cache_dir=cache_dir, device=device
        )


def generate_checkpoint(
    directory: RunDirectory, folder: Path, phase: str, spec: GenerationSpec, *, cache_dir: Path, device: str = "auto"
) -> Iterator[None]:
    """Sample and score one checkpoint under a phase name; existing results are retained.

    Samples are written atomically, then their scores.

    Args:
        directory: the run.
        folder: the checkpoint.
        phase: name for samples and scores.
        spec: the generation settings.
        cache_dir: folder with the prepared data.
        device: "auto", or a torch device.
    """
    run, model = checkpoint.load(folder)
    corpus, kind = corpus_of(run, cache_dir), kind_of(run)
    # fail before an hour of sampling, not after
    oracle = None if spec.oracle is None else kind.oracle(run, spec, corpus, device)
    if not _is_sampled(directory, folder, phase, spec):
        directory.generation_file(phase).unlink(missing_ok=True)  # scores of other samples
        yield from _sample(
            directory, run, model, phase, spec, corpus, resolve_device(device), _collect_sample_settings(folder, spec)
        )
    if oracle is None:
        return
    found, rows = kind.read(directory, phase, corpus), []
    for scores in kind.scores(oracle, found, corpus, spec):
        rows += scores
        yield
    table = _scores(directory, folder, phase, spec)
    own = Registry("objectives").load(run.objective.name).Sampling.model_fields
    shown = {key: json.loads(table.protocol).get(key) for key in ("sampler", "steps", "temperature", "seed", *own)}
    labels = {
        "run_id": directory.run_id,
        "phase": phase,
        **shown,
        "oracle": oracle.name,
        "oracle_sha256": oracle.sha256,
    }
    table.write([{**labels, "sample": index, **row} for index, row in enumerate(rows)], kind.columns)


def _sample(
    directory: RunDirectory,
    run: RunSpec,
    model: nn.Module,
    phase: str,
    spec: GenerationSpec,
    corpus: Any,
    device: torch.device,
    made_by: dict[str, Any],
) -> Iterator[None]:
    """Draw and write one checkpoint's samples, or the reason for none; yield after every step."""
    prepare_torch(run.threads, device)
    kind = kind_of(run)
    source = kind.source(directory, run, model.to(device), corpus, spec, resolve_sampler(run, spec), device)
    found: list[Any] = []
    reason: dict[str, Any] = {}
    try:
        for start in range(0, spec.num, spec.batch):
            found += yield from source.draw(range(start, min(start + spec.batch, spec.num)))
    except NonFinite as error:
        found, reason = [], {"reason": str(error)}  # a result of training, not a crash
    yield from kind.write(directory, phase, found, {**made_by, **reason}, run=run, corpus=corpus, device=device)


def equal_samples(run: RunSpec, spec: GenerationSpec) -> str:
    """Describe a checkpoint's necessarily identical samples, in words; "" if none."""
    return kind_of(run).equal_samples(run, spec, resolve_sampler(run, spec))


def steps_of_a_phase(run: RunSpec, spec: GenerationSpec) -> int:
    """Return an upper bound on the number of yields of `generate` for each phase."""
    return kind_of(run).num_steps(run, spec, resolve_sampler(run, spec))
