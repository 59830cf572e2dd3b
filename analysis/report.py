"""A study's results → reports/<name>.pdf, and the tables that a sweep prints at its end. Reads parquet only; imports no torch."""

from __future__ import annotations

import os
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import typst
from matplotlib.figure import Figure

from analysis.claims import judging as claims
from analysis.drawing import tables, typeset
from analysis.drawing.style import RC
from analysis.numbers.step_shares import LAST, PHASES, phases_and_states, recorded
from analysis.sections import ablation, accuracy, block_shares, components, differences, discrepancy, edge, generative, nll, search, troubles
from analysis.sections import ablation_figure as ablation_plots
from analysis.sections import curves as curve_plots
from analysis.sections import layer_figures as probe_plots
from analysis.sections import layers as probe_tables
from analysis.sections import samples as sample_tables
from analysis.sections import step_figures as curvature_plots
from analysis.sections import steps as curvature_tables
from analysis.sections import stream_figures as stream_plots
from analysis.sections import structure as structure_plots
from analysis.sections.alpha_figures import alpha_figures
from analysis.sections.alpha_tables import alpha_tables
from analysis.sections.generation import generation_tables
from analysis.sections.nll_figures import nll_figure, window_figure
from analysis.sections.overview import overview
from analysis.sections.sensitivity import sensitivity_table
from analysis.sections.throughput import throughput_table
from analysis.study.load import Study, load
from analysis.study.protocol import states_explained, undefined_states
from analysis.words import listed, lr_text, plural

NLL_CAPTION = (
    "Validation NLL at the end of training against learning rate. Points: seeds; line: their median, broken where half of them or more diverged; "
    "×: diverged runs of all runs there. Beneath: the stable window of the median (bar) and of each seed (thin lines); arrow: open, a lower bound; "
    "dotted: the neighbouring rate diverged and the edge lies in between."
)
WINDOW_CAPTION = (
    "Widths of the stable windows. Bar and number: of the median line; points: single seeds; arrow: open, a lower bound; hatched: where the edge may "
    "still lie, the neighbouring rate having diverged."
)
ALPHA_CAPTION = (
    "α_max of the recorded steps against learning rate, {phase}. Above the dashed line (shaded) the training's own step lowers its batch's loss to "
    "second order; the small numbers count steps. Filled crosses: runs that diverged and have no such checkpoint, of all runs there; they count as 0 % "
    "stable, and no α_max is made up for them."
)
NLL, WINDOW = "nll", "window"


def build(study_dir: Path | str, reports_dir: Path | str) -> Path:
    """Write ``<reports_dir>/<name>.pdf`` and return its path; a reader never sees a half-written one.

    Errors: ``ValueError`` where the study's files are missing or of another schema version (see `load`).
    """
    return build_together([study_dir], Path(study_dir).resolve().name, reports_dir)


def build_together(study_dirs: Sequence[Path | str], name: str, reports_dir: Path | str) -> Path:
    """Write ``<reports_dir>/<name>.pdf`` about several studies, one after another. Errors: as `build`."""
    studies = [load(Path(study_dir)) for study_dir in study_dirs]
    with tempfile.TemporaryDirectory(prefix="stability-report-") as folder:
        parts = [(study.name, _subtitle(study), _sections(study, Path(folder), f"{index}-")) for index, study in enumerate(studies)]
        title = f"Learning-rate stability: {name}"
        text = typeset.document(title, *parts[0][1:]) if len(parts) == 1 else typeset.document(title, listed([part[0] for part in parts]), typeset.parts(parts))
        source = Path(folder) / "report.typ"
        source.write_text(text, encoding="utf-8")
        pdf = typst.compile(str(source), root=folder, ignore_system_fonts=True)
    return _replace(Path(reports_dir) / f"{name}.pdf", pdf)


def summary(study_dir: Path | str, phases: Sequence[str] = ("terminal",)) -> str:
    """The plain-text tables at the end of a sweep: NLL, windows, ablations, α_max of the phases' checkpoints in short, and the claims."""
    study = load(study_dir)
    if search.is_search(study):
        return "\n\n".join(table.text() for table in search.search_tables(study)) + "\n"
    general = [*edge.edge_tables(study), *([] if ablation.tells_all(study) else [*_nll_tables(study), nll.window_table(study)])]
    general += accuracy.accuracy_tables(study) + components.component_tables(study)
    parts = [table.text() for table in [*general, *generation_tables(study), *generative.generative_windows(study), *ablation.ablation_tables(study)]]
    parts += ablation.directions(study)
    parts += [table.text(details=False) for table in alpha_tables(study, phases=phases)]
    parts += [absent] if (absent := undefined_states(study)) else []
    judged = claims.claims_table(study)
    parts += ([] if judged is None else [judged.text()]) + [claims.paragraph(study)]
    return "\n\n".join(_wrapped(part) for part in parts) + "\n"


def write_figures(study_dir: Path | str, folder: Path | str, suffix: str = "svg") -> list[Path]:
    """The report's figures as single files (`nll.svg`, …), for a README or a talk."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return [path for path in _draw(load(study_dir), folder, suffix).values() if path is not None]


def _wrapped(part: str) -> str:
    """A paragraph in lines of 110; a table stays as it is."""
    return part if "\n" in part else "\n".join(textwrap.wrap(part, 110))


def _replace(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _draw(study: Study, folder: Path, suffix: str, prefix: str = "") -> dict[str, Path | None]:
    """Every figure into its file; None for one that has no data. α_max has one file per phase and four series."""
    with matplotlib.rc_context(RC):
        if search.is_search(study):
            return {name: _save(figure, folder / f"{prefix}{name}.{suffix}") for name, figure in search.search_figures(study).items()}
        figures: dict[str, Figure | None] = {NLL: nll_figure(study), WINDOW: window_figure(study)}
        figures |= accuracy.accuracy_figures(study) | generative.generative_figures(study)
        figures |= curve_plots.curve_figures(study)
        figures |= ablation_plots.ablation_figures(study)
        figures |= edge.edge_figures(study)
        for phase in _drawn_phases(study):
            figures |= curvature_plots.curvature_figures(study, phase)
            figures |= {f"blocks-{phase}-{index}": figure for index, figure in enumerate(block_shares.block_figures(study, phase))}
            figures |= {f"alpha-{phase}-{index}": figure for index, figure in enumerate(alpha_figures(study, phase))}
        figures |= probe_plots.probe_figures(study) | discrepancy.figures(study) | stream_plots.stream_figures(study) | structure_plots.structure_figures(study)
        return {name: _save(figure, folder / f"{prefix}{name}.{suffix}") for name, figure in figures.items()}


def _drawn_phases(study: Study) -> list[str]:
    """All but the last checkpoints of runs that ended early: these stand at as many different steps, each in a row of its own table."""
    found = [phase for phase, _ in phases_and_states(study)] + [phase for each in study.spectra.values() for phase in each["phase"]]
    return [phase for phase in dict.fromkeys(found) if phase != LAST]


def _save(figure: Figure | None, path: Path) -> Path | None:
    if figure is None:
        return None
    # Without a date the same study gives the same file.
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    figure.savefig(path, metadata=dates.get(path.suffix), dpi=200)
    return path


def _sections(study: Study, folder: Path, prefix: str) -> str:
    figures = _draw(study, folder, "pdf", prefix)
    if search.is_search(study):
        return "".join((overview(study), search.section(study, figures), _troubles(study)))
    alpha = _alpha(study, figures) + _steps_and_spectra(study, figures)
    nll = ablation_plots.section(study, figures) + ("" if ablation.tells_all(study) else _nll(study, figures))
    sections = (
        overview(study),
        _claims(study),
        edge.section(study, figures),
        nll,
        accuracy.section(study, figures),
        components.section(study),
        generative.section(study, figures),
        sample_tables.section(study),
        alpha,
        _probes(study, figures),
        curve_plots.section(study, figures),
        structure_plots.section(study, figures),
        _troubles(study),
    )
    return "".join(sections)


def _nll_tables(study: Study) -> list[typeset.Table]:
    """None where every mechanism chose rates of its own: such a table is mostly holes, and the edges' figure shows them all."""
    return [] if edge.edge_tables(study) else nll.nll_tables(study)


def _subtitle(study: Study) -> str:
    lrs = sorted(set(study.runs["lr"]))
    span = lr_text(lrs[0]) if len(lrs) == 1 else f"{lr_text(lrs[0])} to {lr_text(lrs[-1])}"
    counts = f"{plural(study.runs['seed'].nunique(), 'seed')} · {plural(len(study.runs), 'run')}"
    return f"{listed(study.series)} · {plural(len(lrs), 'learning rate')}, {span} · {counts}"


def _claims(study: Study) -> str:
    table = claims.claims_table(study)
    sentences = typeset.boxed([claim.text for claim in claims.judge(study)])
    return typeset.heading("Do the paper's claims hold here?") + ("" if table is None else table.typst()) + sentences


def _nll(study: Study, figures: dict[str, Path | None]) -> str:
    missing = (
        "A single learning rate makes neither a curve nor a window: the tables say what there is."
        if study.runs["lr"].nunique() < 2
        else "No run ended with a finite validation NLL: there is neither a curve nor a stable window to draw."
    )
    body = [typeset.heading("Validation NLL and the stable window"), tables.captioned(study, figures, NLL, NLL_CAPTION, missing)]
    body += [table.typst() for table in _nll_tables(study)]
    body += [nll.window_table(study).typst()]
    if figures[WINDOW] is not None:
        body.append(tables.captioned(study, figures, WINDOW, WINDOW_CAPTION, ""))
    speed = throughput_table(study)
    body += [] if speed is None else [speed.typst()]
    sensitive = None if edge.edge_tables(study) else sensitivity_table(study)  # a mean over rates that lie close where the edges are
    body += [] if sensitive is None else [sensitive.typst()]
    return "".join(body)


def _alpha(study: Study, figures: dict[str, Path | None]) -> str:
    head = typeset.heading("Maximum stable learning rate α_max along the optimizer's step")
    absent = undefined_states(study)
    if not phases_and_states(study):
        why = absent or "α_max was not measured in this study (hessian=false, or no run left a checkpoint)."
        return head + typeset.paragraph(why)
    body = [head, typeset.paragraph(states_explained(study.curvature) + state_ratio(study)), *([typeset.paragraph(absent)] if absent else [])]
    for name in (name for name in figures if name.startswith("alpha-")):
        phase = name.removeprefix("alpha-").rpartition("-")[0]
        body.append(tables.captioned(study, figures, name, ALPHA_CAPTION.format(phase=PHASES.get(phase, phase)), ""))
    body.append(typeset.paragraph(differences.verification(study)))
    return "".join(body + [table.typst() for table in alpha_tables(study)])


def _steps_and_spectra(study: Study, figures: dict[str, Path | None]) -> str:
    """What the single steps did, and, where `measure=` asked for it, the loss along u, the spectrum and the sharpness."""
    body = []
    for kind, caption in (curvature_plots.CAPTIONS | block_shares.CAPTIONS).items():
        for name in (name for name in figures if name.startswith(f"{kind}-")):
            phase = name.removeprefix(f"{kind}-").rpartition("-")[0]
            body.append(tables.captioned(study, figures, name, caption.format(phase=PHASES.get(phase, phase)), ""))
    single = (differences.differences_table(study), curvature_tables.sharpness_table(study), block_shares.blocks_table(study))
    body += [table.typst() for table in (*curvature_tables.fallen_tables(study), *single) if table is not None]
    return "".join(body)


def _probes(study: Study, figures: dict[str, Path | None]) -> str:
    """What `stability.probe` measured; "" where it measured nothing."""
    if not study.probes:
        return ""
    body = [typeset.heading("What the layers do to their signal")]
    if figures.get("connectivity") is not None:
        body.append(tables.captioned(study, figures, "connectivity", probe_plots.CONNECTIVITY_CAPTION, ""))
        body.append(probe_tables.connectivity_table(study.probes["connectivity"]).typst())
    for kind, what in (("filter", ""), ("energy", "spectra"), ("qk", "qk")):
        for name in (name for name in figures if name.startswith(f"{kind}-")):
            phase = name.removeprefix(f"{kind}-").rpartition("-")[0]
            body.append(tables.captioned(study, figures, name, probe_plots.CAPTIONS[kind].format(phase=PHASES.get(phase, phase)), ""))
        body += [table.typst() for table in probe_tables.study_tables(study, what)]
    body += [discrepancy.section(study, figures), stream_plots.section(study, figures)]
    return "".join(body)


def state_ratio(study: Study) -> str:
    """How α_max under the paper's state compares with that under the run's own, from the runs that have finite medians of both; "" without any."""
    rows = recorded(study, "terminal")
    finite = rows[np.isfinite(rows["alpha_max"])]
    medians = finite.groupby(["run_id", "state"])["alpha_max"].median().unstack()
    if not {"paper", "checkpoint"} <= set(medians.columns):
        return ""
    ratios = (medians["paper"] / medians["checkpoint"]).replace(np.inf, np.nan).dropna()
    if ratios.empty:
        return ""
    return (
        f" Here a run's median α_max under “paper” is {ratios.median():.1f} times that under “checkpoint” "
        f"(median of {plural(len(ratios), 'run')}; {ratios.min():.1f} to {ratios.max():.1f})."
    )


def _troubles(study: Study) -> str:
    table = troubles.trouble_table(study)
    head = typeset.heading("Runs that diverged, failed, or learned nothing")
    return head + (typeset.paragraph("None: every run ended stable.") if table is None else table.typst())


__all__: Sequence[str] = ("build", "summary", "write_figures")
