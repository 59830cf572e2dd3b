"""``python -m stability.generate ckpt=… num=…``: sample checkpoints and score the samples under an oracle."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from stability.cli.entry import run_entry
from stability.cli.publish import collect_and_load, print_tables
from stability.cli.subjects import Work, read_about, select_pending, take_steps
from stability.cli.words import Invocation
from stability.config.generation import GenerateSpec
from stability.config.run import RunSpec
from stability.plan.runs import RunPlan, read_spec
from stability.printable import print_note, print_notes, print_text, visible
from stability.registry import Registry
from stability.runs.directory import RunDirectory
from stability.runs.study import StudyFolder

if TYPE_CHECKING:
    import pandas as pd

HELP = """
python -m stability.generate ckpt=FOLDER num=1000 [key=value …]

ckpt: a study (runs/studies/<name>: all its runs), a run (runs/<run_id>) or a checkpoint (…/checkpoints/step_000200).

  sampler=auto        fits the objective: top_prob for mlm and score_entropy, ar for ar, analytic for a uniform graph
  sampler=top_prob    the paper's: one position at a time, where the model's likeliest token is likeliest
  sampler=random      any position
  sampler=euler | analytic   score_entropy only: all positions at once, in steps=N
  oracle=hf:NAME_OR_FOLDER   score them by a Hugging Face causal LM (the paper's: gpt2-large for text); of proteins by a
                      protein language model: the letters alone
  oracle=ckpt:FOLDER  … or by a run of ours with objective=ar on the same vocabulary; of proteins with
                      objective=multitrack, the same sources and tokenizer: its masked NLL of each sample, a mean over
                      oracle_draws drawn masks
  oracle=evo2:evo2_1b_base   DNA: by Evo 2, by its own package and byte tokenizer
  Proteins are as long as the held-out ones, sample i as protein i; top_prob and random fill one position of one track a
  step.

Samples: runs/<run_id>/samples/<phase>.jsonl (DNA: .fasta; proteins: .fasta and <phase>/sample_<i>.cif beside it,
decoded by the structure tokenizer); scores: runs/<run_id>/generation/<phase>.parquet, nats per token of the oracle and
per byte. What is there already under the same settings is not made again; of other settings it is replaced with
overwrite=true only; `python -m stability.report name=…` shows it.
"""
SHOWN, WIDTH = 3, 110  # number of printed samples, and characters of each


def main(argv: list[str]) -> int:
    """Sample and score the runs of ``ckpt``, then print the study's or run's results."""
    spec = read_about(GenerateSpec, Invocation.of(argv))
    from stability.runs.phases import phases

    plan = RunPlan.of(spec.ckpt, kept="samples", without_checkpoint="there is nothing to sample from")
    print_notes(plan.notes)
    take_steps(_works(plan, spec))
    if plan.study is not None:
        return _publish(plan.study, spec)
    for phase in [plan.phase] if plan.checkpoint is not None else phases(plan.directory, spec.phase):
        _print_samples(plan.directory, phase, SHOWN)
        _print_scores(plan.directory, phase)
    return 0


def _works(plan: RunPlan, spec: GenerateSpec) -> list[Work]:
    """Return the pending sampling and scoring; a run's phase is written whole or not at all."""
    from stability.probes.generation import generating

    where, is_done = {"cache_dir": plan.cache_dir, "device": spec.device}, "generated already with these settings"
    if (folder := plan.checkpoint) is not None:
        one = (plan.directory, folder, plan.phase, spec)
        if (found := generating.describe_replaced(*one)) is not None:
            generating.refuse_to_replace([(plan.directory, plan.phase, found)], spec)
        pending = select_pending(plan, plan.runs, lambda _: not generating.is_done(*one), is_done)
        _warn_of_equal_samples(pending.values(), spec)
        steps = generating.generate_checkpoint(*one, **where)
        return [Work(each, steps, generating.steps_of_a_phase(run, spec), folder.name) for each, run in pending.items()]
    generating.check_kept(plan.runs, spec, spec.phase)
    missing = {each: len(generating.list_missing_phases(each, spec, spec.phase)) for each in plan.runs}
    pending = select_pending(plan, plan.runs, missing.__getitem__, f"{is_done}, or without a checkpoint")
    _warn_of_equal_samples(pending.values(), spec)
    return [
        Work(
            directory,
            generating.generate(directory, spec, **where, phase=spec.phase),
            missing[directory] * generating.steps_of_a_phase(run, spec),
        )
        for directory, run in pending.items()
    ]


def _warn_of_equal_samples(runs: Iterable[RunSpec], spec: GenerateSpec) -> None:
    from stability.probes.generation.generating import equal_samples, resolve_sampler

    for which, sampler in sorted({(equal_samples(run, spec), resolve_sampler(run, spec)) for run in runs}):
        if which:
            how = f"sampler={sampler} with temperature={spec.temperature:g}"
            print_note(f"warning: {how} leaves nothing to chance: {which} will be equal")


def _publish(study: StudyFolder, spec: GenerateSpec) -> int:
    """Collect the study's runs into parquet; print a sample of each and the tables."""
    from analysis.sections.components import generative_component_tables
    from analysis.sections.generation import generation_tables
    from stability.runs.phases import phases

    for directory in study.runs():
        for phase in phases(directory, spec.phase):
            _print_samples(directory, phase, 1)
    loaded = collect_and_load(study)
    tables = generation_tables(loaded) + generative_component_tables(loaded)
    nothing = "no oracle has scored the terminal samples of these runs; add oracle=hf:… or oracle=ckpt:…"
    print_tables(study, tables, nothing)
    return 0


def _print_samples(directory: RunDirectory, phase: str, num: int) -> None:
    """Print the first ``num`` samples of a run's phase, if it has any."""
    from stability.probes.generation.samples import lines_beside
    from stability.runs.samples import first_texts, meta_file

    if not meta_file(directory, phase).exists():
        return
    texts = first_texts(directory, phase, num)
    print_text(f"{directory.run_id} {phase}: {len(texts)} of its samples")
    for text in texts:
        short = textwrap.shorten(text, WIDTH, placeholder=" …") if " " in text else text[:WIDTH]
        print_text(f"  | {visible(short)}")
    for line in lines_beside(directory, phase):
        print_text(line)


def _print_scores(directory: RunDirectory, phase: str) -> None:
    """Print the generative NLL of one phase of a run."""
    from stability.runs.parquet import read_table

    path = directory.generation_file(phase)
    if path.exists() and len(table := read_table(path).to_pandas()):
        scored = table.nll.dropna()
        error = scored.sem() if len(scored) > 1 else float("nan")
        print_text(
            f"{phase}: generative NLL {scored.mean():.4f} ± {error:.4f} {_of_whom(directory, table)} (mean and standard error "
            f"over {len(scored)} samples)"
        )
    print_text(f"samples: {directory.path / 'samples'}")


def _of_whom(directory: RunDirectory, table: pd.DataFrame) -> str:
    """Describe the scores: unit, oracle, summands of the NLL if any, and NLL per byte."""
    words = Registry("objectives").load(read_spec(directory).objective.name).words
    means = table.mean(numeric_only=True).dropna()
    parts = [
        f"{column.removeprefix('nll_')} {means[column]:.4f}"
        for column in map(str, means.index)
        if column.startswith("nll_") and column != "nll_per_byte"
    ]
    return (
        words.of_oracle.format(oracle=table.oracle.iloc[0])
        + (f": {' + '.join(parts)}" if parts else "")
        + (f", {means.nll_per_byte:.4f} per byte" if "nll_per_byte" in means else "")
    )


if __name__ == "__main__":
    run_entry(main, "generate", HELP)
