"""``python -m stability.probe what=…``: measure trained layers, and graphs on their own.

Of layers it measures spectra, σ(W_qᵀW_k), discrepancy and streams; of runs the NLL of reversed text and of training windows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability.cli import coordinates
from stability.cli.entry import check_writable, run_entry
from stability.cli.publish import collect_and_load, print_report_command, print_tables
from stability.cli.subjects import Work, follow, read_about, select_pending, take_steps
from stability.cli.words import Invocation
from stability.config.entries import ProbeSpec
from stability.config.run import RunSpec
from stability.plan.runs import RunPlan
from stability.printable import print_notes, print_text
from stability.registry import Registry
from stability.runs.study import StudyFolder

if TYPE_CHECKING:
    import pandas as pd

    from analysis.sections.probed import ProbeTables

HELP = """
python -m stability.probe what=spectra|qk|streams|mirror|train_nll|lengths|quantization ckpt=FOLDER [key=value …]
python -m stability.probe what=training_free ckpt=FOLDER mechanism=[sparge,fasa] [key=value …]
python -m stability.probe what=connectivity [ckpt=STUDY]
python -m stability.probe what=pdmm [ckpt=FOLDER]
python -m stability.probe what=coordinates model.width=[64,128,256,512] parametrization=[standard,mup] [key=value …]

ckpt: a study (runs/studies/<name>: all its runs), a run (runs/<run_id>) or a checkpoint (…/checkpoints/step_000200).

  what=spectra        per layer and head on held-out text: the learned graph's Laplacian (largest and Fiedler
                      eigenvalue, density, filter 1 − 2ηλ), softmax matrices beside it (singular values, second
                      eigenvalue), energy and variance before and after
  what=qk             singular values of W_qᵀW_k per layer and head of softmax attention
  what=connectivity   λ_1 of window-path, cycle and complete graphs against closed form and bounds; a study's report
                      then shows it
  what=pdmm           the primal-dual method of multipliers on small networks, synchronous and asynchronous: distance
                      from the optimum and consensus discrepancy by iteration; with ckpt beside it softmax attention's
                      discrepancy, V − γ·softmax·V and V − softmax·V, by depth
  what=streams        per token, how doubly stochastic the mixing matrices of residual streams are (hc, mhc, mhc_lite),
                      one by one and multiplied through depth: relative range ν before Sinkhorn, column and row sums,
                      spectral norms, gains of the signal and of its gradient
  what=training_free  mechanism=[sparge,fasa] replace sa in the trained model, with its weights and no training, and
                      leave out more and more: per budget the NLL beyond sa's, the relative error of each layer's
                      output, and the share of the products that is skipped
  what=mirror         validation NLL on the run's held-out examples and on the same examples read backwards, under
                      mirrored masks and noise: a mechanism that is blind to order has the same on both
  what=train_nll      NLL on as many windows of the training side as validation has, evaluated alike; the validation NLL
                      less it is the generalisation gap
  what=lengths        NLL of held-out text of 2 and 4 times the trained length (lengths=[2,4]) less that of the same
                      text in pieces of that length; position=learned has none. The report judges whether a longer
                      text is predicted better
  what=quantization   validation NLL with the linear maps of mixers and feed-forward networks rounded to bits=[8,6,4,3,2],
                      one scale a row and a group of 64 inputs (groups=[0,64]), the relative error of each layer's
                      output, RMS and kurtosis of the weights; phase=before_decay adds the checkpoint before schedule=wsd
                      lowers the rate. The report judges whether larger rates quantise better, and whether decay hurts
  what=coordinates    a parametrization's coordinate check: 5 steps on one batch at each size of model.width or
                      model.layers, slopes of activations, their changes and gradients against size, a verdict on each
                      parametrization and reports/coordinates.pdf; it takes the words of stability.sweep for the model,
                      mechanism, residual, norm, optimizer, data, lr, batch, steps and seeds; with ckpt=STUDY that
                      study's report shows it

What is measured already under the same protocol is not measured again; `python -m stability.report name=…` draws it.
"""


def main(argv: list[str]) -> int:
    """Measure the runs of ``ckpt``, or graphs or sizes alone, then print the tables."""
    if coordinates.is_asked(Invocation.of(argv)):
        return _coordinates(Invocation.of(argv))
    spec = read_about(ProbeSpec, Invocation.of(argv))
    if spec.what == "connectivity" or spec.ckpt is None:
        return _graphs(spec)
    lacking = "there is nothing to probe; take a lower learning rate"
    plan = RunPlan.of(spec.ckpt, kept="rows", without_checkpoint=lacking)
    print_notes(plan.notes)
    take_steps(_works(plan, spec))
    if plan.study is not None:
        return _publish(plan.study, spec)
    _print_tables(plan, spec)
    return 0


def _works(plan: RunPlan, spec: ProbeSpec) -> list[Work]:
    """Return the pending work; a run's phase is written whole or not at all."""
    from stability.probes.layers.measuring import list_missing_phases, measure, measure_checkpoint
    from stability.probes.layers.observing import list_observable, say_what_is_missing

    observable = {directory: list_observable(run, spec.what) for directory, run in plan.runs.items()}
    if not observable:  # the plan's notes say why
        return []
    say_what_is_missing(spec.what, observable.values())  # a single run without measurable layers is refused
    fitting = [directory for directory, found in observable.items() if found.is_there]
    if (folder := plan.checkpoint) is not None:
        return [
            Work(
                directory,
                measure_checkpoint(directory, folder, plan.phase, spec, cache_dir=plan.cache_dir),
                _steps_of_a_phase(plan.runs[directory], spec),
                folder.name,
            )
            for directory in fitting
        ]
    missing = {directory: len(list_missing_phases(directory, spec)) for directory in fitting}
    pending = select_pending(plan, fitting, missing.__getitem__, "measured already under this protocol")
    return [
        Work(
            directory,
            measure(directory, spec, cache_dir=plan.cache_dir),
            missing[directory] * _steps_of_a_phase(run, spec),
        )
        for directory, run in pending.items()
    ]


def _steps_of_a_phase(run: RunSpec, spec: ProbeSpec) -> int:
    """Return the number of progress bar steps in one phase of this measurement."""
    if spec.what in ("mirror", "train_nll"):
        return 1
    if spec.what == "lengths":
        return len(spec.lengths)
    if spec.what == "quantization":
        return len(spec.bits) * len(spec.groups)
    if spec.what == "streams":
        return spec.sequences + 1
    if spec.what == "training_free":
        from stability.probes.layers.training_free import variants_of

        return sum(len(variants_of(run, part, spec.budgets)) for part in spec.mechanism)
    return run.model.layers * (1 if spec.what == "qk" else run.model.loops * spec.sequences)


def _tables_of(what: str) -> ProbeTables:
    """Return how the numbers of ``what`` are printed."""
    from analysis.sections import discrepancy, layers, lengths, mirror, quantization, streams, train_nll, training_free

    return {
        "spectra": layers.SPECTRA_TABLES,
        "qk": layers.QK_TABLES,
        "pdmm": discrepancy.DEPTHS,
        "streams": streams.TABLES,
        "training_free": training_free.TABLES,
        "mirror": mirror.TABLES,
        "train_nll": train_nll.TABLES,
        "lengths": lengths.TABLES,
        "quantization": quantization.TABLES,
    }[what]


def _publish(study: StudyFolder, spec: ProbeSpec) -> int:
    """Collect the study's runs into parquet and print the tables."""
    from analysis.sections import discrepancy, lengths, quantization
    from stability.runs.results import write_graphs

    if spec.what == "pdmm":
        write_graphs(spec.what, _graph_frame(spec), study.results)
    loaded = collect_and_load(study)
    of_study = discrepancy.study_tables if spec.what == "pdmm" else _tables_of(spec.what).of_study
    print_tables(study, of_study(loaded), f"no run of {study.path.name} has numbers for what={spec.what}")
    if spec.what in (judged := {"lengths": lengths, "quantization": quantization}):
        print_notes(judged[spec.what].sentences(loaded))
    return 0


def _print_tables(plan: RunPlan, spec: ProbeSpec) -> None:
    """Print one run's numbers by phase, if it has any."""
    from analysis.sections.discrepancy import pdmm_table
    from stability.probes.layers.consensus import ropes_of
    from stability.probes.layers.observing import layers_of
    from stability.runs.results import read_probe

    ((directory, run),) = plan.runs.items()
    found = _tables_of(spec.what)
    frames = {name: read_probe(directory, name) for name in found.names}
    series = run.residual.name if spec.what == "streams" else run.mechanism.name
    words = Registry("objectives").load(run.objective.name).words
    ropes = ropes_of(layers_of(run, spec.what)) if spec.what == "spectra" else ()
    tables = found.of_run(frames, series, words, ropes)
    if spec.what == "pdmm":
        tables.append(pdmm_table(_graph_frame(spec)))
    if tables:  # a run of consensus has none for what=qk, as already printed
        print_text("\n\n".join(table.text(details=False) for table in tables))
    if any(len(rows) for rows in frames.values()):
        print_text(f"rows: {directory.path / 'probes'}")


def _graph_frame(spec: ProbeSpec) -> pd.DataFrame:
    """Return the rows of what=connectivity or of what=pdmm's networks; they need no run."""
    from stability.probes.graphs.pdmm import connectivity_rows, pdmm_rows
    from stability.runs.results import graph_frame

    if spec.what == "connectivity":
        return graph_frame(spec.what, list(connectivity_rows()))
    how = {"rho": spec.rho, "averaging": spec.averaging, "iterations": spec.iterations}
    return graph_frame(
        spec.what, list(pdmm_rows(nodes=spec.nodes, constraints=spec.constraints, seed=spec.seed, **how))
    )


def _graphs(spec: ProbeSpec) -> int:
    """Compute, print and store rows without a run: in a study's results, or as a figure."""
    from analysis.sections import connectivity_figures, discrepancy
    from analysis.sections import layers as probe_tables

    study = _read_study(spec.ckpt)
    frame = _graph_frame(spec)
    table, draw = {
        "connectivity": (probe_tables.connectivity_table, connectivity_figures.connectivity_figure),
        "pdmm": (discrepancy.pdmm_table, discrepancy.pdmm_figure),
    }[spec.what]
    print_text(table(frame).text())
    if spec.what == "connectivity":
        print_text(connectivity_figures.bounds_sentence({spec.what: frame}))
    return _store(spec.what, frame, draw, study, spec.reports_dir)


def _read_study(ckpt: str | None) -> StudyFolder | None:
    """Return the study of ``ckpt``, if any; ValueError without its file."""
    if ckpt is None:
        return None
    study = StudyFolder(ckpt)
    study.read()
    return study


def _store(
    what: str, frame: pd.DataFrame, draw: Callable[[Any], Any], study: StudyFolder | None, reports_dir: str
) -> int:
    """Write a table to a study's results, or without a study its figure."""
    from analysis.sections.connectivity_figures import write_figure
    from stability.runs.results import write_graphs

    if study is None:
        print_text(f"figure: {write_figure(draw, frame, Path(reports_dir) / f'{what}.pdf')}")
    else:
        write_graphs(what, frame, study.results)
        print_report_command(study)
    return 0


def _coordinates(invocation: Invocation) -> int:
    """Run the coordinate check, print verdicts and slopes, and store it as `_graphs` does."""
    from analysis.sections.coordinates import coordinates_figure, coordinates_tables, verdict_lines
    from stability.build import resolve_device
    from stability.probes.layers.coordinates import Coordinates
    from stability.runs.results import graph_frame

    spec = coordinates.read_recipe(invocation)
    study = _read_study(next((word.value for word in invocation.words if word.key == "ckpt"), None))
    check_writable("runs_dir", spec.runs_dir)
    check_writable("reports_dir", spec.reports_dir)
    models, corpus = coordinates.list_models(spec)
    device = resolve_device(spec.device)
    checks = [Coordinates(run, corpus, device) for run in models]
    labels = [coordinates.model_label(columns[0]) for columns in models.values()]
    follow((each.steps() for each in checks), labels, [spec.steps + 1] * len(checks))
    rows = [own | row for each in checks for own in models[each.run] for row in each.rows]
    frame = graph_frame(coordinates.WHAT, rows)
    for line in verdict_lines(frame):
        print_text(line)
    print_text("\n\n".join(table.text() for table in coordinates_tables(frame)))
    return _store(coordinates.WHAT, frame, coordinates_figure, study, spec.reports_dir)


if __name__ == "__main__":
    run_entry(main, "probe", HELP)
