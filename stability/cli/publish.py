"""End a measurement: collect a study's tables, print them and draw its PDF."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stability.printable import print_text, shell_text
from stability.registry import Registry
from stability.runs.answers import MOST_INPUTS, Answer, AnswerFile
from stability.runs.study import StudyFolder
from stability.startup import seldom_collected, uncollected

if TYPE_CHECKING:
    from analysis.drawing.typeset import Table
    from analysis.study.load import Study
    from stability.config.run import RunSpec
    from stability.plan.plan import Plan
    from stability.runs.up_to_date import Published
    from sweeps.record import StudyRecord
    from sweeps.trial import Trial

OF_RUNS = ("lr_peak", "seed")  # fields of a spec without effect on `_parsed_columns`
MOST_LEFT_OUT = 2  # skipped runs and files named in the short text


def publish(
    study: StudyFolder,
    reports_dir: str | None,
    phases: Sequence[str] = ("terminal",),
    *,
    unless_same: bool = False,
    tables: Literal["best", "all"] = "all",
    reference: str | None = None,
    pages: Literal["short", "all"] = "short",
) -> Study | None:
    """Collect the runs into parquet, write the PDF and print the tables.

    Args:
        study: the study.
        reports_dir: folder of the PDF; None: no PDF.
        phases: phases of the checkpoints with α_max in the printed tables.
        unless_same: whether to print the last result again if no run, table or code file has changed since; drawing
            takes longer than checking 200 runs.
        tables: the printed text: the best rates, or every table.
        reference: mechanism that the others are compared with; None: as in the sweep.
        pages: the PDF's pages, as in `analysis.assembly.pieces`.

    Returns:
        The study as loaded for the tables; None if nothing has changed.
    """
    if unless_same and (lines := unchanged_lines(study, reports_dir, phases, tables, pages)) is not None:
        for line in lines:
            print_text(line)
        return None
    pdf = _pdf_of(study, reports_dir)
    published = _published(study, pdf, phases, tables, pages)
    with uncollected():
        from analysis.assembly import first_figure
        from analysis.report import build_together, ending, summary

    with seldom_collected():
        left_out = _collect(study)
        known = _load(study, reference)
        written = None if pdf is None else build_together([known], pdf.stem, pdf.parent, pages)
        left_out = _shorten(left_out) if tables == "best" else left_out
        text = "\n".join([*left_out, summary(known, phases) if tables == "all" else ending(known, phases)])
        if tables == "best" and written is not None and (figure := first_figure(known)):
            place = written.parent / study.path.name / "figures" / figure
            text += f"\nfigure for a paper, with format=files: {place}"
    if reference is None:  # the record is of the sweep's own report
        published.record(text)
    print_text(text)  # last: an error of the terminal then loses no other output
    if written is not None:
        print_text(f"report: {written}")
    if tables == "best":
        print_text(_line_on_tables(study, reports_dir))
    return known


def publish_alpha(study: StudyFolder, phases: Sequence[str]) -> None:
    """Collect the runs into parquet, and print α_max at the best learning rates.

    Args:
        study: the study.
        phases: phases of the measured checkpoints.
    """
    with seldom_collected():
        from analysis.sections.alpha_brief import describe_at_best_rates

        left_out = _shorten(_collect(study))
        print_text("\n".join([*left_out, describe_at_best_rates(_load(study), phases)]))


def _shorten(left_out: Sequence[str]) -> list[str]:
    """Return the lines on the first skipped runs and files, and the number of the others."""
    more = len(left_out) - MOST_LEFT_OUT
    rest = [f"left out: {more} more; tables=all names them"] if more > 0 else []
    return [*left_out[:MOST_LEFT_OUT], *rest]


def unchanged_lines(
    study: StudyFolder,
    reports_dir: str | None,
    phases: Sequence[str] = ("terminal",),
    tables: Literal["best", "all"] = "all",
    pages: Literal["short", "all"] = "short",
) -> list[str] | None:
    """Return the text of the last `publish` with these arguments; None if an input or output has changed.

    Args:
        study: the study.
        reports_dir: folder of the PDF; None: no PDF.
        phases: phases of the checkpoints with α_max in the tables.
        tables: the best rates, or every table.
        pages: the PDF's pages.
    """
    pdf = _pdf_of(study, reports_dir)
    text = _published(study, pdf, phases, tables, pages).summary()
    if text is None:
        return None
    made = [] if pdf is None else [f"report: {pdf}, nothing has changed since it was made"]
    return [text, *made, *([_line_on_tables(study, reports_dir)] if tables == "best" else [])]


def _pdf_of(study: StudyFolder, reports_dir: str | None) -> Path | None:
    return None if reports_dir is None else Path(reports_dir) / f"{study.path.name}.pdf"


def _published(study: StudyFolder, pdf: Path | None, phases: Sequence[str], tables: str, pages: str) -> Published:
    from stability.runs.up_to_date import Published

    return Published(study, pdf, (*phases, tables, pages), _drawing_code())


def _line_on_tables(study: StudyFolder, reports_dir: str | None) -> str:
    """Return the command for all tables."""
    elsewhere = (f"reports_dir={reports_dir}",) if reports_dir and Path(reports_dir) != Path("reports") else ()
    return f"every table: {_report_command(study, *elsewhere, 'tables=all')}"


def collect_and_load(study: StudyFolder) -> Study:
    """Collect a study's runs into parquet and load them.

    A line is printed for each skipped run or file.
    """
    for line in _collect(study):
        print_text(line)
    return _load(study)


def _load(study: StudyFolder, reference: str | None = None) -> Study:
    from analysis.study.load import load

    return load(study.path, reference)


def _collect(study: StudyFolder) -> list[str]:
    """Collect a study's runs into parquet; return a line for each skipped run or file."""
    with uncollected():
        from stability.runs.results import collect, write

    found = collect(study.path, _read_each_curve_once())
    write(found, study.results)
    return [f"left out: {line}" for line in found.left_out]


def _read_each_curve_once() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return `_parsed_columns`, computed once for all rates and seeds of a curve."""
    known: dict[str, dict[str, Any]] = {}

    def read(spec: dict[str, Any]) -> dict[str, Any]:
        curve = json.dumps({key: value for key, value in spec.items() if key not in OF_RUNS}, sort_keys=True)
        if curve not in known:
            known[curve] = _parsed_columns(spec)
        return known[curve]

    return read


def _parsed_columns(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a study's runs derived from a run's spec; {} if its plugin is missing."""
    from stability.build import count_idle_parameters, sequence_state_bytes
    from stability.config.parse import parse_run

    try:
        run = parse_run(spec)
    except ValueError:
        return {}
    direction = Registry("objectives").load(run.objective.name).direction
    of_few = {"idle_params": count_idle_parameters(run), "piecewise_smooth": int(_is_piecewise_smooth(run))}
    return {
        "state_bytes": sequence_state_bytes(run, direction),
        "settings": _settings(run),
        "reading": _reading(run),
        "blind_to_order": int(_is_blind_to_order(run, direction)),
        **{name: value for name, value in of_few.items() if value},
    }


def _is_piecewise_smooth(run: RunSpec) -> bool:
    """Return whether a part of a run's model selects by its own scores, so that its loss is smooth in pieces."""
    mechanism = Registry("mechanisms").load(run.mechanism.name)
    return mechanism.is_piecewise_smooth(run.mechanism.settings) or Registry("ffns").load(run.ffn.name).piecewise_smooth


def _is_blind_to_order(run: RunSpec, direction: str) -> bool:
    """Return whether a run's model hardly or never distinguishes a text from its mirror image."""
    from stability.mechanisms import MixerShape, gives_mirrored_outputs

    # a causal reader knows the direction, and a cross mechanism's context may reveal it
    if direction == "causal" or run.cross is not None:
        return False
    mechanism, settings = Registry("mechanisms").load(run.mechanism.name), run.mechanism.settings
    position = Registry("positions").load(run.position.name)
    if position.rope(run.position.settings) is not None:
        return mechanism.blind_to_order(settings)
    if position.adds or Registry("objectives").load(run.objective.name).embeds_positions:
        return False
    size = run.model
    shapes = [
        MixerShape(size.width, size.heads, direction, layer, size.layers, None, num_positions=size.positions)
        for layer in range(size.layers)
    ]
    return not mechanism.needs_edges(settings) and all(
        gives_mirrored_outputs(lambda shape=shape: mechanism.build(settings, shape), size.width) for shape in shapes
    )


def _settings(run: RunSpec) -> str:
    """Return the changed settings of a run's mechanisms, e.g. ``"rank=8 rope=absolute cc.rope=none"``."""
    from stability.config.ablation import value_text
    from stability.config.parts import unusual_settings

    found = unusual_settings(run.mechanism)
    if run.cross is not None:
        found |= {f"{run.cross.name}.{key}": value for key, value in unusual_settings(run.cross).items()}
    return " ".join(f"{key}={value_text(value)}" for key, value in found.items())


def _reading(run: RunSpec) -> str:
    """Return the readings of their papers' formulas that a run's mechanism and its cross mechanism compute."""
    registry = Registry("mechanisms")
    if Registry("positions").load(run.position.name).rope(run.position.settings) is None:
        has_any = any(registry.load(each.name).reading(each.settings) for each in (run.mechanism, run.cross) if each)
        return f"nothing is rotated (position={run.position.name})" if has_any else ""
    readings = [registry.load(run.mechanism.name).reading(run.mechanism.settings)]
    if run.cross is not None and (beside := registry.load(run.cross.name).reading(run.cross.settings)):
        readings.append(f"{run.cross.name} {beside}")
    return "; ".join(filter(None, readings))


def print_tables(study: StudyFolder, tables: Sequence[Table], nothing: str) -> None:
    """Print a study's tables, and the command that draws them.

    Args:
        study: the study.
        tables: the tables.
        nothing: text printed if there are no tables.
    """
    print_text("\n\n".join(table.text() for table in tables) or nothing)
    print_report_command(study)


def print_report_command(study: StudyFolder) -> None:
    """Print the command that draws the new measurements into the study's PDF."""
    print_text(f"next, to draw this into the study's PDF: {_report_command(study)}")


def _report_command(study: StudyFolder, *more: str) -> str:
    runs_dir = study.path.parents[1]
    elsewhere = () if runs_dir.resolve() == Path("runs").resolve() else (f"runs_dir={runs_dir}",)
    return f"python -m stability.report {shell_text(f'name={study.path.name}', *elsewhere, *more)}"


def _drawing_code() -> list[Path]:
    """Return the source files of `analysis` (not imported) and of the collecting package."""
    package = Path(__file__).resolve().parents[1]
    return [*(package.parent / "analysis").rglob("*.py"), *(package / "runs").rglob("*.py")]


def store_answer(
    file: AnswerFile, plan: Plan, trials: Sequence[Trial], record: StudyRecord, notes: Sequence[str]
) -> None:
    """Record the text that the same command prints while nothing changes.

    Nothing is recorded of an unfinished sweep, nor of one that depends on more than data, code and runs: on plugins,
    other runs' weights, samples, a trained tokenizer, or the rounds of a search.

    Args:
        file: the answer's file.
        plan: the sweep.
        trials: its runs.
        record: its record, closed.
        notes: the sentences printed first.
    """
    spec = plan.spec
    depends_on_more = spec.plugins or spec.init or spec.generate or spec.search or spec.lr.edge
    has_tokenizer = getattr(spec.objective.settings, "tokenizer", None) is not None
    if depends_on_more or has_tokenizer:
        return
    from sweeps.launch import describe_launch

    inputs = list(map(str, Registry("data").load(spec.data.name).inputs(spec.data.settings)))
    if len(inputs) > MOST_INPUTS:
        return
    if spec.report:
        inputs.append(str(Path(spec.reports_dir, f"{spec.name}.pdf").resolve()))
    skips = describe_launch(len({trial.run_id for trial in trials}))
    corpus = str(plan.pool / "cache" / plan.corpus.fingerprint)
    answer = Answer(str(record.study.path), (corpus,), tuple(inputs), tuple(notes), (skips,))
    # between two equal states nothing has changed: all that is found in between is right in this state
    before = answer.state()
    lines = _lines_after(plan, trials, record)
    if lines is not None and answer.state() == before:
        file.write(replace(answer, lines=(skips, *lines)), before)


def _lines_after(plan: Plan, trials: Sequence[Trial], record: StudyRecord) -> list[str] | None:
    """Return the tables and the report's place; None if a command would work on a run, or say more."""
    from sweeps import earlier
    from sweeps.trial import is_done

    for trial in trials:
        try:
            trial.directory.write_spec(trial.spec)
        except ValueError:  # another run's folder
            return None
        if not is_done(trial):
            return None
    if any(earlier.describe_changes(record.study, record.study.read(), trials)):
        return None
    spec = plan.spec
    return unchanged_lines(record.study, spec.reports_dir if spec.report else None, tables=spec.tables)
