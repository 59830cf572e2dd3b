"""``python -m stability.probe what=…``: what trained layers do to their signal (spectra, σ(W_qᵀW_k), discrepancy), and graphs on their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stability.cli.compose import read_spec
from stability.cli.entry import run_entry
from stability.cli.progress import follow
from stability.cli.subjects import locked, with_verdict

HELP = """
python -m stability.probe what=spectra|qk|streams ckpt=FOLDER [key=value …]
python -m stability.probe what=connectivity [ckpt=STUDY]
python -m stability.probe what=pdmm [ckpt=FOLDER]

ckpt: a study (runs/studies/<name>: all its runs), a run (runs/<run_id>) or a checkpoint (…/checkpoints/step_000200).

  what=spectra        per layer and head on held-out text: the learned graph's Laplacian (largest and Fiedler eigenvalue, density, filter 1 − 2ηλ),
                      softmax matrices beside it (singular values, second eigenvalue), energy and variance before and after
  what=qk             singular values of W_qᵀW_k per layer and head of softmax attention
  what=connectivity   λ_1 of window-path, cycle and complete graphs against closed form and bounds; a study's report then shows it

  what=pdmm           the primal-dual method of multipliers on small networks, synchronous and asynchronous: distance from the optimum and consensus
                      discrepancy by iteration; with ckpt beside it softmax attention's discrepancy, V − γ·softmax·V and V − softmax·V, by depth

  what=streams        per token, how doubly stochastic the mixing matrices of residual streams are (hc, mhc, mhc_lite), one by one and multiplied through
                      depth: relative range ν before Sinkhorn, column and row sums, spectral norms, gains of the signal and of its gradient

  phase=terminal | earliest | last | all   which checkpoints of a run (last: of one that diverged before its end)
  sequences=2                       held-out sequences                      (spectra, pdmm, streams)
  outlier_log_range=30              ln(1/ν) above which a token is an outlier       (streams)
  probes=4 products=32 seed=0       random vectors of a density, products   (spectra)
  nodes=8 rho=1 iterations=200 seed=0 averaging=1 constraints=consensus | general    the networks, and how they are solved   (pdmm)
  device=auto | cpu | cuda          where the model runs                    (spectra, pdmm)
  reports_dir=reports               folder of the figure                    (connectivity, pdmm without ckpt)

What is measured already under the same protocol is not measured again; `python -m stability.report name=…` draws it.
"""


def main(argv: list[str]) -> int:
    spec = read_spec("probe", argv)
    if spec.what == "connectivity" or (spec.what == "pdmm" and spec.ckpt is None):
        return _graphs(spec)
    from stability.runs.directory import RunDirectory
    from stability.runs.study import StudyFolder

    folder = Path(spec.ckpt).resolve()
    if (folder / "study.json").exists():
        study = StudyFolder(folder)
        _measure_runs(study.runs(), spec)
        return _publish(study, spec)
    if (folder / "spec.json").exists():
        directory = RunDirectory.at(folder)
        _measure_runs([directory], spec)
    else:
        directory = _measure_checkpoint(folder, spec)
    _print_tables(directory, spec)
    return 0


def _measure_runs(directories: Sequence, spec) -> None:
    """Measure what is missing under one bar; a run's phase is written whole or not at all. A run that is asked for alone must have something to measure."""
    from stability.probes.layers.measuring import measure, missing_phases
    from stability.probes.layers.subjects import say_what_is_missing, subject_of

    alone = len(directories) == 1
    directories = with_verdict(directories)
    specs = {directory: _spec_of(directory) for directory in directories}
    if alone:
        _require_checkpoint(directories[0])
    subjects = {directory: subject_of(specs[directory], spec.what) for directory in directories}
    say_what_is_missing(spec.what, subjects.values())
    fitting = [directory for directory in directories if subjects[directory].is_there]
    pending = [directory for directory in fitting if missing_phases(directory, spec)]
    if len(pending) < len(fitting):
        print(f"skips {len(fitting) - len(pending)} of {len(fitting)}: measured already under this protocol")
    steps = (locked(directory, measure(directory, spec, cache_dir=directory.path.parent / "cache")) for directory in pending)
    follow(
        steps,
        [directory.run_id for directory in pending],
        [len(missing_phases(directory, spec)) * _steps_of_a_phase(specs[directory], spec) for directory in pending],
    )


def _measure_checkpoint(folder: Path, spec):
    """A single checkpoint: earliest, terminal and last keep their names, any other is a phase of its own."""
    from stability.probes.layers.measuring import measure_checkpoint
    from stability.probes.layers.subjects import say_what_is_missing, subject_of
    from stability.runs.directory import RunDirectory
    from stability.runs.phases import phases
    from stability.training.checkpoint import verified_manifest

    verified_manifest(folder)
    directory = RunDirectory.at(folder.parent.parent)
    if not directory.spec_file.exists():
        raise ValueError(f"{folder} is not inside a run's folder (runs/<run_id>/checkpoints/…), where its rows would be kept; copy the whole run")
    run = _spec_of(directory)
    subject = subject_of(run, spec.what)
    say_what_is_missing(spec.what, [subject])
    if not subject.is_there:
        return directory
    phase = {path: name for name, path in phases(directory, "all").items()}.get(folder, folder.name)
    steps = measure_checkpoint(directory, folder, phase, spec, cache_dir=directory.path.parent / "cache")
    follow([locked(directory, steps)], [f"{directory.run_id} {folder.name}"], [_steps_of_a_phase(run, spec)])
    return directory


def _spec_of(directory):
    from stability.config.parse import parse_run
    from stability.runs.directory import read_json

    return parse_run(read_json(directory.spec_file))


def _require_checkpoint(directory) -> None:
    if not directory.checkpoints():
        raise ValueError(f"{directory.run_id} is {directory.status()['state']} and left no checkpoint: there is nothing to probe; take a lower learning rate")


def _steps_of_a_phase(run, spec) -> int:
    """As many as the measurement yields."""
    if spec.what == "streams":
        return spec.sequences + 1
    return run.model.layers * (1 if spec.what == "qk" else spec.sequences)


def _publish(study, spec) -> int:
    """Collect the study's runs into parquet and print the tables."""
    from analysis.sections import discrepancy
    from analysis.sections import layers as probe_tables
    from analysis.sections import streams as stream_tables
    from analysis.study.load import load
    from stability.runs.results import collect, write, write_graphs

    write(collect(study.path), study.results)
    if spec.what == "pdmm":
        write_graphs(spec.what, _graph_frame(spec), study.results)
    loaded = load(study.path)
    own = {"pdmm": discrepancy.study_tables, "streams": stream_tables.study_tables}.get(spec.what)
    tables = probe_tables.study_tables(loaded, spec.what) if own is None else own(loaded)
    print("\n\n".join(table.text() for table in tables) or f"no run of {study.path.name} has numbers for what={spec.what}")
    print("drawn by: python -m stability.report name=" + study.path.name)
    return 0


def _print_tables(directory, spec) -> None:
    """One run's numbers by phase; nothing where it has none."""
    from analysis.sections import discrepancy
    from analysis.sections import layers as probe_tables
    from analysis.sections import streams as stream_tables
    from stability.probes.layers.consensus import ropes_of
    from stability.probes.layers.measuring import TABLES
    from stability.probes.layers.subjects import layers_of
    from stability.runs.results import read_probe

    run, rows = _spec_of(directory), read_probe(directory, TABLES[spec.what][0])
    mechanism = run.mechanism
    if spec.what == "streams":
        tables = stream_tables.run_tables(rows, run.residual.name)
    elif spec.what == "pdmm":
        tables = [*discrepancy.run_tables(rows, mechanism.name), discrepancy.pdmm_table(_graph_frame(spec))]
    else:
        ropes = ropes_of(layers_of(run, spec.what))
        tables = probe_tables.run_tables(rows, mechanism.name, spec.what, ropes)
    if tables:  # a run of consensus has none of what=qk, which was said
        print("\n\n".join(table.text(details=False) for table in tables))
    if len(rows):
        print(f"rows: {directory.path / 'probes'}")


def _graph_frame(spec):
    """The rows of what=connectivity and of what=pdmm's networks, which no run has a part in."""
    from stability.probes.graphs.connectivity import connectivity_rows
    from stability.probes.graphs.pdmm import pdmm_rows
    from stability.runs.results import graph_frame

    if spec.what == "connectivity":
        return graph_frame(spec.what, list(connectivity_rows()))
    how = {"rho": spec.rho, "averaging": spec.averaging, "iterations": spec.iterations}
    return graph_frame(spec.what, list(pdmm_rows(nodes=spec.nodes, constraints=spec.constraints, seed=spec.seed, **how)))


def _graphs(spec) -> int:
    """Compute, print, and keep: among a study's results, or as a figure of its own."""
    from analysis.sections import discrepancy
    from analysis.sections import layer_figures as probe_plots
    from analysis.sections import layers as probe_tables
    from stability.runs.results import write_graphs
    from stability.runs.study import StudyFolder

    study = None if spec.ckpt is None else StudyFolder(spec.ckpt)
    if study is not None:
        study.read()
    frame = _graph_frame(spec)
    table, draw = {
        "connectivity": (probe_tables.connectivity_table, probe_plots.connectivity_figure),
        "pdmm": (discrepancy.pdmm_table, discrepancy.pdmm_figure),
    }[spec.what]
    print(table(frame).text())
    if study is None:
        print(f"figure: {probe_plots.write_figure(draw, frame, Path(spec.reports_dir) / f'{spec.what}.pdf')}")
    else:
        write_graphs(spec.what, frame, study.results)
        print("drawn by: python -m stability.report name=" + study.path.name)
    return 0


if __name__ == "__main__":
    run_entry(main, HELP)
