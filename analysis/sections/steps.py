"""Check the recorded steps: their real change of the batch's loss, and exact curvatures beside central differences.

float64 decides which of two curvatures is inaccurate. Sharpness and its companions have a table, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from analysis.drawing.tables import chunks
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.step_shares import (
    DIVERGED,
    LAST,
    PHASES,
    TERMINAL,
    count_stable_steps,
    finite_median,
    phases_and_states,
    recorded_steps,
    series_with_results,
    series_without_alpha,
)
from analysis.sections.alpha_tables import ALPHA_COLUMNS, counting_rule, share_cell
from analysis.study.load import Column, Frame, Study
from analysis.study.once import once_per_study
from analysis.study.protocol import methods, state_text, terms_in_brief
from analysis.words import join_words, lr_text, plural, power, significant


def find_fallen(rows: Frame) -> Column:
    """Return a mask of steps that lowered their own batch's loss; False for a non-finite loss."""
    return rows["loss_after"] < rows["loss_before"]


@once_per_study
def make_fallen_tables(study: Study) -> list[Table]:
    """Return one table per phase, state and at most four series: share of steps with lower loss after.

    With critical LR over α_max if measured.
    """
    tables = []
    for phase, state in phases_and_states(study):
        if phase != LAST:
            rows, count = recorded_steps(study, phase, state), count_stable_steps(study, phase, state, find_fallen)
            tables += [
                _make_fallen_table(study, rows, count, phase, state, part)
                for part in chunks(series_with_results(study, count), ALPHA_COLUMNS)
                if part
            ]
    return tables


def _make_fallen_table(
    study: Study, rows: Frame, count: Frame, phase: str, state: str, series: tuple[str, ...]
) -> Table:
    """Return one table, one row per learning rate: % of steps with lower loss after.

    With critical LR / α_max if measured.
    """
    critical, undefined = bool(rows["critical_lr"].notna().any()), series_without_alpha(study, count)
    count, rows = count[count["series"].isin(series)], rows[rows["series"].isin(series)]
    body = []
    of_rate, nothing = dict(iter(rows.groupby("run_lr"))) if critical else {}, rows.iloc[:0]
    for lr, counts in count[["run_lr", "series", "outcome", "hits", "steps"]].groupby("run_lr"):
        cells, part = [share_cell(counts[counts["series"] == name]) for name in series], of_rate.get(lr, nothing)
        cells += [_ratio(part[part["series"] == name]) for name in series] if critical else []
        body.append((Cell(lr_text(lr)), *cells))
    caption = (
        "Share of recorded steps after which the loss of the step's own batch was lower than before, in %; below it "
        f"the range over runs, and n, the steps. {counting_rule(study, rows, phase)} (survivors: the share without "
        f"them). {beyond_alpha_max(rows)}"
        + (
            " Right: median over steps of critical LR / α_max, where both are finite and positive; below it the "
            "quartiles and n."
            if critical
            else ""
        )
        + (f" Not defined in this state: {join_words(undefined)}." if undefined else "")
        + terms_in_brief(study)
    )
    groups = [("", 1), ("% of steps that lowered the loss", len(series))]
    groups += [("critical LR / α_max", len(series))] if critical else []
    title = f"Steps whose loss really fell, {state_text(state)}, {PHASES.get(phase, phase)}"
    return Table(title, caption, ("LR", *series, *(series if critical else ())), tuple(body), tuple(groups))


def beyond_alpha_max(rows: Frame) -> str:
    """Return the number of steps beyond α_max and their successes, as text.

    A success is a lower loss: α_max is a threshold of second order only.
    """
    beyond = rows[rows["alpha_max"] < rows["lr"].fillna(rows["run_lr"])]
    if beyond.empty:
        return "α_max is a threshold of second order; no step went beyond it here."
    fell = int(find_fallen(beyond).sum())
    return (
        f"α_max is a threshold of second order: of the {plural(len(beyond), 'step')} beyond it, {fell} lowered the "
        "loss nevertheless."
    )


def _ratio(part: Frame) -> Cell:
    """Return the median critical LR / α_max over finite positive pairs, quartiles and n."""
    pair = part[["critical_lr", "alpha_max"]]
    usable = part[(np.isfinite(pair) & (pair > 0)).all(axis=1)]
    if usable.empty:
        return Cell("--")
    ratios = (usable["critical_lr"] / usable["alpha_max"]).to_numpy(dtype=float)
    low, high = np.quantile(ratios, (0.25, 0.75))
    return Cell(
        significant(float(np.median(ratios))), f"{significant(float(low))}–{significant(float(high))}, n={len(ratios)}"
    )


def drop_diverged(study: Study, rows: Frame) -> Frame:
    """Return ``rows`` without terminal rows of diverged runs.

    As in `step_shares.recorded` these have no terminal checkpoint, even if an older version's results have one.
    """
    diverged = study.runs.loc[study.runs["status"] == "diverged", "run_id"]
    return rows[(rows["phase"] != TERMINAL) | ~rows["run_id"].isin(diverged)]


def diverged_note(count: Frame) -> str:
    """Return the share of diverged, unmeasured runs as text, e.g. diverged 2/3; "" for none.

    ``count`` is from `count_stable_steps`.
    """
    number = int((count["outcome"] == DIVERGED).sum())
    return f"diverged {number}/{len(count)}" if number else ""


def spectrum_rows(study: Study, name: str) -> Iterator[tuple[str, str, str, float, Frame, str]]:
    """Yield a spectrum's rows by ``(phase, state, series, LR)``, each with a divergence note.

    If every run diverged, the rows are empty.
    """
    rows = drop_diverged(study, study.with_run(study.spectra[name]))
    pairs = set(study.spectra[name][["phase", "state"]].itertuples(index=False, name=None))
    for phase, state in sorted(pairs | {(TERMINAL, state) for phase, state in pairs if phase == LAST}):
        count, part = count_stable_steps(study, phase, state), rows[(rows["phase"] == phase) & (rows["state"] == state)]
        for series in study.series:
            for lr in sorted(set(study.of(series)["lr"])):
                own = part[(part["series"] == series) & (part["run_lr"] == lr)]
                note = diverged_note(count[(count["series"] == series) & (count["run_lr"] == lr)])
                if note or len(own):
                    yield phase, state, series, lr, own, note


def sharpness_table(study: Study) -> Table | None:
    """Return medians over seeds by series, LR, phase and state; None if sharpness was not measured."""
    if "sharpness" not in study.spectra or study.spectra["sharpness"].empty:
        return None
    columns = ("sharpness", "adam_ratio", "trace", "gauss_newton_share", "noise_scale")
    columns += ("attention_logit_max", "attention_entropy")
    body = []
    for phase, state, series, lr, group, lost in spectrum_rows(study, "sharpness"):
        detail = "\n".join(filter(None, (f"{phase}, {state_text(state)}, n={len(group)}", lost)))
        body.append((Cell(series, detail), Cell(lr_text(lr)), *(_median(group[column]) for column in columns)))
    caption = (
        "At the first recorded step; median over the n runs measured, below it their range; a run that diverged "
        "left no terminal checkpoint to measure and is counted under the name. λ_max: largest Hessian eigenvalue "
        "(Lanczos). Adam ratio: λ_max of the preconditioned Hessian over its threshold (2+2β₁)/((1−β₁)η), unstable "
        "above 1 (Cohen et al. 2022). Trace: Hutch++. GN: share of uᵀHu that the Gauss–Newton part makes up. Noise: "
        "gradient noise scale in sequences. Attention: largest logit, and mean entropy in nats."
    )
    header = ("mechanism", "LR", "λ_max", "Adam ratio", "trace", "GN", "noise", "logit", "entropy")
    return Table("Sharpness and its companions", caption, header, tuple(body))


def _median(values: Column) -> Cell:
    known = values[values.notna()]
    if known.empty:
        return Cell("--")
    ends = f"{significant(float(known.min()))}–{significant(float(known.max()))}" if len(known) > 1 else ""
    return Cell(significant(float(known.median())), ends)


# relative error beyond which float64 decides the inaccurate side (`stability.probes.curvature.descent.DOUBTFUL`)
DOUBTFUL = 1e-3


def verification(study: Study) -> str:
    """Describe the curvatures' methods and their distance from central differences.

    One curvature per run and state is compared. Beyond `DOUBTFUL`, the text names the inaccurate one of the two.
    """
    rows = drop_diverged(study, study.curvature)
    if rows.empty:
        return "No step was recorded: every run that was to be measured diverged before its checkpoint."
    used = f"Methods: {methods(rows)}."
    checked = rows[rows["rel_error"].notna()]
    if checked.empty:
        return f"{used} No curvature was compared with central differences."
    worst = checked.loc[checked["rel_error"].idxmax()]
    return (
        f"{used} Verification: in {plural(len(checked), 'step')} the curvature was compared with central differences "
        f"of the gradient; relative error: median {power(float(np.median(checked['rel_error'])))}, largest "
        f"{power(float(worst['rel_error']))} (run {worst['run_id']}, {state_text(worst['state'])})."
        f"{_explain_errors(checked)}"
    )


def _explain_errors(checked: Frame) -> str:
    """Describe the errors of difference and curvature against float64 over steps beyond `DOUBTFUL`; "" for none."""
    doubtful = checked[checked["rel_error"] > DOUBTFUL]
    judged = doubtful[np.isfinite(doubtful["float64_curvature"])]
    if doubtful.empty:
        return ""
    beyond = f" Beyond {DOUBTFUL:g}: {plural(len(doubtful), 'step')}"
    if judged.empty:
        return f"{beyond}, none of them computed in float64: which of the two is off is not known there."
    off, error = _errors(judged, "difference_curvature")
    left = len(doubtful) - len(judged)
    others = f"; of the other {left} it is not known which is off" if left else ""
    return (
        f"{beyond}, {'all' if not others else len(judged)} of them computed once more in float64: there the "
        f"difference was off by up to {power(off)}, the value that is used by up to {power(error)}{others}."
    )


def _errors(judged: Frame, other: str) -> list[float]:
    """Return the largest relative errors against float64: of curvature ``other``, of the used one."""
    exact = judged["float64_curvature"]
    return [float(relative_difference(judged[name], exact).max()) for name in (other, "curvature")]


def _papers_error(rows: Frame) -> str:
    """Describe the error of the paper's difference against float64; "" without float64 values."""
    judged = rows[np.isfinite(rows["float64_curvature"])]
    if judged.empty:
        return ""
    off, error = _errors(judged, "parity_curvature")
    return (
        f" In {plural(len(judged), 'pair')} uᵀHu was computed once more in float64: there the paper's difference was "
        f"off by up to {power(off)}, the exact value by up to {power(error)}."
    )


def pairs(rows: Frame) -> Frame:
    """Return the recorded steps with both curvatures finite."""
    return rows[np.isfinite(rows["curvature"]) & np.isfinite(rows["parity_curvature"])]


def relative_difference(exact: Column, other: Column) -> Column:
    """Return |a − b| / max(|a|, |b|), row by row; 0 if both are 0."""
    larger = np.maximum(exact.abs(), other.abs())
    return ((exact - other).abs() / larger.where(larger > 0, 1.0)).rename("difference")


def find_other_sign(exact: Column, other: Column) -> Column:
    """Return a mask of rows with only one positive curvature: Eq. 18 gives a finite step for that one only."""
    return (exact > 0) != (other > 0)


def differences_table(study: Study) -> Table | None:
    """Return a table with one row per phase, state and series; None if no step has both curvatures."""
    rows = pairs(drop_diverged(study, study.with_run(study.curvature)))
    body = []
    for phase, state in phases_and_states(study):
        of_state, count = pairs(recorded_steps(study, phase, state)), count_stable_steps(study, phase, state)
        for name in study.present(of_state):
            lost = diverged_note(count[count["series"] == name])
            body.append(_row(of_state[of_state["series"] == name], name, f"{phase}, {state_text(state)}", lost))
    if not body:
        return None
    caption = (
        "The recorded steps measured both exactly and by the paper's central difference of gradients, (∇L(θ+εu) − "
        "∇L(θ−εu))/2ε with raw ε = 1e-4, at the same θ and along the same u. Difference: median of |a − b| / "
        "max(|a|, |b|), below it the largest; other sign: share of pairs in which one of the two is positive and "
        "the other is not. α_max: median of the finite ones. % stable: share of the pairs with α_max above the "
        "training LR (a run that diverged has no pairs at a terminal checkpoint and is counted under "
        f"them).{_papers_error(rows)}{SW if 'sw' in set(rows['mechanism']) else ''}{terms_in_brief(study)}"
    )
    header = ("mechanism", "pairs", "|difference|", "other sign", *("exact", "paper's") * 2)
    groups = (("", 2), ("uᵀHu", 2), ("median α_max", 2), ("% stable", 2))
    return Table("Exact and finite differences", caption, header, tuple(body), groups)


# Section 5.2.1 and Eq. 20
SW = (
    " For sw the paper has differences only: its band-masked implementation gave numerically unstable "
    "Hessian-vector products. Here sw is exact as well."
)


def _row(part: Frame, name: str, where: str, lost: str) -> tuple[Cell, ...]:
    """Return one series' row: pairs, relative difference, opposite signs, and both median α_max and % stable."""
    exact, other = part["curvature"], part["parity_curvature"]
    difference, rate = relative_difference(exact, other), part["lr"].fillna(part["run_lr"])
    signs = find_other_sign(exact, other)
    medians = [finite_median(part[column]) for column in ("alpha_max", "parity_alpha_max")]
    shares = [100 * (part[column] > rate).mean() for column in ("alpha_max", "parity_alpha_max")]
    return (
        Cell(name, where),
        Cell(str(len(part)), "\n".join(filter(None, (plural(part["run_id"].nunique(), "run"), lost)))),
        Cell(power(float(difference.median())), f"≤ {power(float(difference.max()))}"),
        Cell(f"{100 * signs.mean():.0f} %", f"{int(signs.sum())} of {len(part)}"),
        *(Cell("--" if np.isnan(median) else power(median)) for median in medians),
        *(Cell(f"{share:.0f}") for share in shares),
    )
