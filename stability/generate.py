"""``python -m stability.generate ckpt=… num=…``: samples of a checkpoint, a run or every run of a study, and their NLL under an oracle."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from stability.cli.compose import read_spec
from stability.cli.entry import run_entry
from stability.cli.progress import follow
from stability.cli.subjects import locked, with_verdict

HELP = """
python -m stability.generate ckpt=FOLDER num=1000 [key=value …]

ckpt: a study (runs/studies/<name>: all its runs), a run (runs/<run_id>) or a checkpoint (…/checkpoints/step_000200).

  sampler=auto        what fits the objective: top_prob for mlm and score_entropy, ar for ar, analytic for a uniform graph
  sampler=top_prob    the paper's: one position at a time, where the model's likeliest token is likeliest     sampler=random   any position
  sampler=euler | analytic   score_entropy only: all positions at once, in steps=N (null: as many as positions)
  temperature=1.0     0: always the likeliest token         seed=0    sample i is a function of it and of i
  oracle=hf:NAME_OR_FOLDER   score them by a Hugging Face causal LM (the paper's: gpt2-large for text)
  oracle=ckpt:FOLDER  … or by a run of ours with objective=ar on the same vocabulary
  Proteins (objective=multitrack) are as long as the held-out ones, sample i as protein i; top_prob and random fill one position of one track a step.
  contexts=empty | given   whether the model is shown what is known of protein i beside its sequence and structure (objective.contexts)
  oracle=ckpt:FOLDER  a run with objective=multitrack, the same sources and tokenizer: its masked NLL of each sample, total and by track, as in validation,
                      a mean over oracle_draws=8 drawn masks
  phase=terminal | earliest | last | all   which checkpoints (last: of a run that diverged before its end)
  batch=32            sequences at a time       device=auto | cpu | cuda

Samples: runs/<run_id>/samples/<phase>.jsonl (DNA: .fasta; proteins: .fasta and <phase>/sample_<i>.cif beside it, decoded by the structure tokenizer);
scores: runs/<run_id>/generation/<phase>.parquet, nats per token of the oracle and per byte.
What is there already under the same settings is not made again; of other settings it is replaced with overwrite=true only;
`python -m stability.report name=…` shows it.
"""
SHOWN, WIDTH = 3, 110  # samples that are printed, and how much of each


def main(argv: list[str]) -> int:
    spec = read_spec("generate", argv)
    from stability.runs.directory import RunDirectory
    from stability.runs.phases import phases
    from stability.runs.study import StudyFolder

    folder = Path(spec.ckpt).resolve()
    if (folder / "study.json").exists():
        study = StudyFolder(folder)
        _generate_runs(study.runs(), spec)
        return _publish(study, spec)
    if (folder / "spec.json").exists():
        directory = RunDirectory.at(folder)
        _generate_runs([directory], spec)
        shown = list(phases(directory, spec.phase))
    else:
        directory, shown = _generate_checkpoint(folder, spec)
    for phase in shown:
        _print_samples(directory, phase, SHOWN)
        _print_scores(directory, phase)
    return 0


def _generate_runs(directories: Sequence, spec) -> None:
    """Sample and score what is missing under one bar; a run's phase is written whole or not at all. A run asked for alone must have a checkpoint."""
    from stability.config.parse import parse_run
    from stability.probes.generation.generating import check_kept, generate, missing_phases, num_steps
    from stability.runs.directory import read_json

    alone = len(directories) == 1
    directories = with_verdict(directories)
    if alone and not directories[0].checkpoints():
        raise ValueError(f"{directories[0].run_id} is {directories[0].status()['state']} and left no checkpoint: there is nothing to sample from")
    check_kept(directories, spec, spec.phase)
    pending = [directory for directory in directories if missing_phases(directory, spec, spec.phase)]
    if len(pending) < len(directories):
        print(f"skips {len(directories) - len(pending)} of {len(directories)}: generated already with these settings, or without a checkpoint")
    cache = {directory: directory.path.parent / "cache" for directory in pending}
    steps = (locked(directory, generate(directory, spec, cache_dir=cache[directory], device=spec.device, phase=spec.phase)) for directory in pending)
    _warn_of_equal_samples([parse_run(read_json(directory.spec_file)) for directory in pending], spec)
    follow(steps, [directory.run_id for directory in pending], [num_steps(directory, spec, spec.phase) for directory in pending])


def _generate_checkpoint(folder: Path, spec):
    """A single checkpoint: earliest, terminal and last keep their names, any other is a phase of its own."""
    from stability.config.parse import parse_run
    from stability.probes.generation.generating import generate_checkpoint, is_done, refuse_to_replace, replaced, steps_of_a_phase
    from stability.runs.directory import RunDirectory
    from stability.runs.phases import phases
    from stability.training.checkpoint import verified_manifest

    run = parse_run(verified_manifest(folder)["spec"])
    directory = RunDirectory.at(folder.parent.parent)
    if not directory.spec_file.exists():
        raise ValueError(f"{folder} is not inside a run's folder (runs/<run_id>/checkpoints/…), where its samples would be kept; copy the whole run")
    phase = {path: name for name, path in phases(directory, "all").items()}.get(folder, folder.name)
    if is_done(directory, folder, phase, spec):
        print("skips 1 of 1: generated already with these settings")
    else:
        found = replaced(directory, folder, phase, spec)
        refuse_to_replace([] if found is None else [(directory, phase, found)], spec)
        _warn_of_equal_samples([run], spec)
        steps = generate_checkpoint(directory, folder, phase, spec, cache_dir=directory.path.parent / "cache", device=spec.device)
        follow([locked(directory, steps)], [f"{directory.run_id} {folder.name}"], [steps_of_a_phase(run, spec)])
    return directory, [phase]


def _warn_of_equal_samples(runs: Sequence, spec) -> None:
    from stability.probes.generation.generating import equal_samples

    for which in sorted({equal_samples(run, spec) for run in runs} - {""}):
        print(f"warning: sampler=top_prob with temperature=0 leaves nothing to chance: {which} will be equal")


def _publish(study, spec) -> int:
    """Collect the study's runs into parquet, print a sample of each and the tables."""
    from analysis.sections.components import generative_component_tables
    from analysis.sections.generation import generation_tables
    from analysis.study.load import load
    from stability.runs.phases import phases
    from stability.runs.results import collect, write

    for directory in study.runs():
        for phase in phases(directory, spec.phase):
            _print_samples(directory, phase, 1)
    write(collect(study.path), study.results)
    loaded = load(study.path)
    tables = generation_tables(loaded) + generative_component_tables(loaded)
    print("\n\n".join(table.text() for table in tables) or "no oracle has scored the terminal samples of these runs; add oracle=hf:… or oracle=ckpt:…")
    print("drawn by: python -m stability.report name=" + study.path.name)
    return 0


def _print_samples(directory, phase: str, num: int) -> None:
    from stability.probes.generation.samples import lines_beside
    from stability.runs.samples import first_texts, meta_file

    if not meta_file(directory, phase).exists():
        return
    texts = first_texts(directory, phase, num)
    print(f"{directory.run_id} {phase}: {len(texts)} of its samples")
    for text in texts:
        print("  | " + textwrap.shorten(text.replace("\x00", "␀"), WIDTH, placeholder=" …") if " " in text else "  | " + text[:WIDTH])
    for line in lines_beside(directory, phase):
        print(line)


def _print_scores(directory, phase: str) -> None:
    """One run's generative NLL, a line a phase."""
    import pandas as pd

    path = directory.generation_file(phase)
    if path.exists() and len(table := pd.read_parquet(path)):
        scored = table.nll.dropna()
        error = scored.sem() if len(scored) > 1 else float("nan")
        print(f"{phase}: generative NLL {scored.mean():.4f} ± {error:.4f} {_of_whom(table)} (mean and standard error over {len(scored)} samples)")
    print(f"samples: {directory.path / 'samples'}")


def _of_whom(table) -> str:
    """Unit and oracle, and the same per byte; of proteins, by whose masked NLL, and the tracks that it is the sum of."""
    oracle, means = table.oracle.iloc[0], table.mean(numeric_only=True).dropna()
    if tracks := [f"{name} {means[column]:.4f}" for name in ("sequence", "structure") if (column := f"nll_{name}") in means]:
        return f"nats per residue by the masked NLL of {oracle}: {' + '.join(tracks)}"
    return f"nats per token of {oracle}" + (f", {means.nll_per_byte:.4f} per byte" if "nll_per_byte" in means else "")


if __name__ == "__main__":
    run_entry(main, HELP)
