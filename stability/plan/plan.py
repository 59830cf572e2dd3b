"""A sweep resolved once: its data, its models, its runs.

Printing, training and recording a sweep all read it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stability.build import as_read, build_model, build_objective, described
from stability.config.parts import Part
from stability.config.rules import check_rules
from stability.config.run import RunSpec
from stability.config.sweep import SweepSpec
from stability.corpora import cache
from stability.corpora.base import AbstractCorpus
from stability.models.backbone import Backbone, num_active_parameters, num_parameters
from stability.models.init import without_memory
from stability.objectives import AbstractObjective
from stability.plan.rules import OF_PLAN
from stability.registry import Registry


@dataclass(frozen=True)
class ResolvedRun:
    """The runs of a sweep that differ only in learning rate and seed.

    Attributes:
        name: ``mechanism/residual/norm/optimizer``, and the ablation's label.
        spec: one of these runs.
        format: the `format` of its data.
    """

    name: str
    spec: RunSpec
    format: Any

    @cached_property
    def model(self) -> Backbone:
        """The model on torch's meta device, without allocated memory."""
        with without_memory():
            return build_model(self.spec, self.format)

    @property
    def num_params(self) -> int:
        return num_parameters(self.model)

    @property
    def num_active_params(self) -> int:
        """Number of parameters that one position meets, fewer with ``ffn=moe``."""
        return num_active_parameters(self.model)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor in the model's state, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}


def name_kind(run: RunSpec, variant: str) -> str:
    """Name a kind of run: ``mechanism/residual/norm/optimizer``, and the ablation's label.

    With a cross mechanism the first name is e.g. ``sa+ca``.
    """
    mechanism = run.mechanism.name + ("" if run.cross is None else f"+{run.cross.name}")
    parts = (mechanism, run.residual.name, run.norm.name, run.optimizer.name, run.parametrization.name)
    kind = "/".join(part for part in parts if part != "standard")
    return " ".join(filter(None, (kind, variant)))


MOST_HELD_OUT = 0.5  # share of the data that a note may propose to hold out
SIZES_IN_TOKENS = ("text_", "gpt_", "nanogpt_", "sedd_")  # prefixes of sizes published with GPT-2's tokens


@dataclass(frozen=True)
class Plan:
    """A resolved sweep.

    Attributes:
        spec: the sweep, with the sha256 of its initial weights.
        corpus: the prepared data in the objective's form.
        is_read: whether the corpus is the real data; a dry run downloads nothing and may use random tokens.
        objective: the objective on these data.
        kinds: the kinds of run, one for each curve over learning rates, in the order of `SweepSpec.curves`.
        points: every run with its variant's label (`SweepSpec.points`).
        notes: further notes for the user.
    """

    spec: SweepSpec
    corpus: Any
    is_read: bool
    objective: AbstractObjective
    kinds: tuple[ResolvedRun, ...]
    points: tuple[tuple[str, RunSpec], ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, spec: SweepSpec) -> Plan:
        """Prepare the data and resolve the runs, without writing the study.

        Raises:
            ValueError: the data cannot be prepared, or a rule of `stability.plan.rules` is broken; at most two lines.
        """
        pool = Path(spec.runs_dir).resolve()
        runs = spec.kinds()  # a run that breaks a rule is refused before data are prepared for it
        corpus, is_read = (cache.prepare_for_plan if spec.dry_run else _prepare)(spec.data, pool / "cache")
        corpus = as_read(corpus, spec.objective, pool, for_plan=spec.dry_run)
        objective = build_objective(spec, corpus.format)
        shared = {"data_fingerprint": corpus.fingerprint}
        kinds = tuple(
            ResolvedRun(name_kind(run, label), run.model_copy(update=shared | {"lr_peak": own[0]}), corpus.format)
            for (label, run), own in zip(runs, spec.rates(), strict=True)
        )
        spec, notes = resolve_weights(spec, kinds, pool / "cache")
        plan = cls(spec, corpus, is_read, objective, kinds, spec.points(corpus.fingerprint), notes)
        check_rules(OF_PLAN, plan)
        more = (note_bytes(spec), *note_full_windows(kinds), _note_short_validation(plan))
        return replace(plan, notes=tuple(filter(None, (*notes, *more))))

    @property
    def pool(self) -> Path:
        """Folder of the runs."""
        return Path(self.spec.runs_dir).resolve()


def _prepare(data: Part, cache_dir: Path) -> tuple[Any, bool]:
    return cache.prepare(data, cache_dir), True


def objective_line(spec: SweepSpec) -> str:
    """Return a line with the objective's name and task."""
    task = Registry("objectives").load(spec.objective.name).task
    return f"objective: {spec.objective.name}" + (f" ({task})" if task else "")


def data_line(spec: SweepSpec, corpus: AbstractCorpus) -> str:
    """Return a line on the data: counts, left-out items, tokens, fingerprint."""
    tokens = Registry("data").load(spec.data.name).tokens_of(spec.data.settings)
    named = f"; tokens: {tokens}" if tokens else ""
    return f"data: {described(spec, corpus)}{named}; fingerprint {corpus.fingerprint[:12]}"


def note_bytes(spec: SweepSpec) -> str:
    """Return a note if a size for GPT-2's tokens is trained on bytes, else ""."""
    if getattr(spec.data.settings, "tokenizer", None) != "bytes" or not spec.model.name.startswith(SIZES_IN_TOKENS):
        return ""
    return (
        f"data={spec.data.name} trains on bytes, a vocabulary of 256, and model={spec.model.name} is a size for "
        "GPT-2's tokens: add data.tokenizer=gpt2 for these"
    )


def note_full_windows(kinds: Sequence[ResolvedRun]) -> list[str]:
    """Return a note for each window of ``sw`` that covers all positions, so that it computes the same as ``sa``."""
    runs = [kind.spec for kind in kinds if kind.spec.mechanism.name == "sw"]
    sizes: list[tuple[Any, int]] = [(run.mechanism.settings, run.model.positions) for run in runs]
    found = [
        f"mechanism.sw.window={settings.window} covers all {positions} positions: sw is sa here"
        for settings, positions in sizes
        if settings.window >= positions - 1
    ]
    return list(dict.fromkeys(found))


def _note_short_validation(plan: Plan) -> str:
    """Return a note if the held-out data are fewer than requested, else ""."""
    asked, positions = plan.spec.evaluation.sequences, plan.objective.tokens_needed(plan.spec.model.positions)
    num = len(plan.corpus.windows("val", asked, positions)) if plan.is_read else asked
    if num >= asked:
        return ""
    return (
        f"validation: on all {num:,} held-out examples, fewer than evaluation.sequences={asked}; "
        f"{_advise_more_held_out(plan, num, asked, positions)}"
    )


def _advise_more_held_out(plan: Plan, num: int, asked: int, positions: int) -> str:
    """Return the setting or the amount of data that gives ``asked`` held-out examples where there are ``num``."""
    settings, times = plan.spec.data.settings, asked / num
    for key in ("held_out", "hold_out"):
        value = getattr(settings, key, None)
        if isinstance(value, int):  # a number of sequences
            return f"data.{key}={math.ceil(times * value)} holds out enough"
        if isinstance(value, float) and times * value <= MOST_HELD_OUT:
            return f"data.{key}={math.ceil(100 * times * value) / 100:g} holds out enough"
    return plan.corpus.advise_more(num, asked, positions)


def resolve_weights(
    spec: SweepSpec, kinds: Sequence[ResolvedRun], cache_dir: Path
) -> tuple[SweepSpec, tuple[str, ...]]:
    """Find the weights named by ``init`` and copy them into the pool's cache; a dry run copies nothing.

    Args:
        spec: the sweep.
        kinds: its kinds of runs; the weights must fit their tensors.
        cache_dir: the pool's folder of prepared data.

    Returns:
        The spec with the sha256 of its weights, and a text with the tensors used by each kind; without ``init`` the
            spec itself and no text.

    Raises:
        ValueError: the weights do not exist or do not fit every kind; one or two lines.
    """
    if spec.init is None:
        return spec, ()
    from stability.training import hugging_face
    from stability.training.weights import Weights, describe_weights

    if spec.init.source.startswith("hf:"):
        config = hugging_face.read_config(spec.init.place)
        for kind in () if spec.init.partial else kinds:
            hugging_face.require(config, kind.spec, f"init={spec.init.source}")
    with TemporaryDirectory() as scratch:
        weights = Weights.find(spec.init, kinds[0].shapes, Path(scratch))
        fits = {kind.name: weights.fit(kind.shapes) for kind in kinds}
        for name, fit in fits.items():
            fit.require(weights.spec, name)
        if not spec.dry_run:
            weights.keep(cache_dir)
    return spec.model_copy(update={"init": weights.spec}), (describe_weights(weights.spec, fits),)
