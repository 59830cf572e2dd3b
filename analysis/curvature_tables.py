"""What the recorded steps really did to their batch's loss, beside what α_max said of them."""

from __future__ import annotations

import numpy as np

from analysis.load import Column, Frame, Study
from analysis.spread import lr_text, plural, power
from analysis.tables import ALPHA_COLUMNS, PHASES, chunks, phases_and_states, source
from analysis.typeset import Cell, Table


def fallen_steps(rows: Frame) -> Column:
    """Which recorded steps lowered the loss of their own batch; a step lost to a non-finite loss did not."""
    return rows["loss_after"] < rows["loss_before"]


def fallen_tables(study: Study) -> list[Table]:
    """One table per phase, state and at most four series: share of steps whose loss fell and, where it was measured, critical LR over α_max."""
    rows = study.with_run(study.curvature)
    tables = []
    for phase, state in phases_and_states(study):
        recorded = rows[(rows["phase"] == phase) & (rows["state"] == state)]
        present = tuple(name for name in study.series if name in set(recorded["series"]))
        tables += [_fallen_table(study, recorded, phase, state, part) for part in chunks(present, ALPHA_COLUMNS)]
    return tables


def _fallen_table(study: Study, recorded: Frame, phase: str, state: str, series: tuple[str, ...]) -> Table:
    critical = bool(recorded["critical_lr"].notna().any())
    body = []
    for lr in sorted(set(recorded["run_lr"])):
        parts = [recorded[(recorded["run_lr"] == lr) & (recorded["series"] == name)] for name in series]
        cells = [_share(part) for part in parts] + ([_ratio(part) for part in parts] if critical else [])
        body.append((Cell(lr_text(lr)), *cells))
    caption = (
        "Share of recorded steps after which the loss of the step's own batch was lower than before, in %; below it the range over runs, and n, the steps. "
        f"{beyond_alpha_max(recorded[recorded['series'].isin(series)])}"
        + (" Right: median over steps of critical LR / α_max, where both are finite and positive; below it the quartiles and n." if critical else "")
        + f" {source(study)}"
    )
    groups = (("", 1), ("% of steps that lowered the loss", len(series)), *((("critical LR / α_max", len(series)),) if critical else ()))
    title = f"Steps whose loss really fell, state “{state}”, {PHASES.get(phase, phase)}"
    return Table(title, caption, ("LR", *series, *(series if critical else ())), tuple(body), groups)


def beyond_alpha_max(rows: Frame) -> str:
    """How often a step longer than α_max, a threshold of second order only, lowered its loss nevertheless; says where there was none."""
    beyond = rows[rows["alpha_max"] < rows["lr"].fillna(rows["run_lr"])]
    if beyond.empty:
        return "α_max is a threshold of second order; no step went beyond it here."
    fell = int(fallen_steps(beyond).sum())
    return f"α_max is a threshold of second order: of the {plural(len(beyond), 'step')} beyond it, {fell} lowered the loss nevertheless."


def _share(part: Frame) -> Cell:
    if part.empty:
        return Cell("--")
    fell = fallen_steps(part)
    by_run = fell.groupby(part["run_id"]).mean() * 100
    interval = f"{by_run.min():.0f}–{by_run.max():.0f}, " if len(by_run) > 1 else ""
    return Cell(f"{fell.mean() * 100:.0f}", f"{interval}n={len(part)}")


def _ratio(part: Frame) -> Cell:
    usable = part[np.isfinite(part["critical_lr"]) & (part["critical_lr"] > 0) & np.isfinite(part["alpha_max"]) & (part["alpha_max"] > 0)]
    if usable.empty:
        return Cell("--")
    ratios = (usable["critical_lr"] / usable["alpha_max"]).to_numpy(dtype=float)
    low, high = np.quantile(ratios, (0.25, 0.75))
    return Cell(power(float(np.median(ratios))), f"{power(float(low))}–{power(float(high))}, n={len(ratios)}")


def sharpness_table(study: Study) -> Table | None:
    """Medians over seeds of each series, LR, phase and state; None where sharpness was not measured."""
    if "sharpness" not in study.spectra or study.spectra["sharpness"].empty:
        return None
    rows = study.with_run(study.spectra["sharpness"])
    rows = rows.assign(order=rows["series"].map(study.series.index)).sort_values(["phase", "state", "order", "run_lr"], kind="stable")
    columns = ("sharpness", "adam_ratio", "trace", "gauss_newton_share", "noise_scale", "attention_logit_max", "attention_entropy")
    body = []
    for (phase, state, series, lr), group in rows.groupby(["phase", "state", "series", "run_lr"], sort=False):
        cells = [_median(group[column]) for column in columns]
        body.append((Cell(f"{series}", f"{phase}, {state}, n={len(group)}"), Cell(lr_text(lr)), *cells))
    caption = (
        "At the first recorded step; median over the seeds, below it their range. λ_max: largest Hessian eigenvalue (Lanczos). Adam ratio: λ_max of the "
        "preconditioned Hessian over its threshold (2+2β₁)/((1−β₁)η), unstable above 1 (Cohen et al. 2022). Trace: Hutch++. GN: share of uᵀHu that the "
        f"Gauss–Newton part makes up. Noise: gradient noise scale in sequences. Attention: largest logit, and mean entropy in nats. {source(study)}"
    )
    header = ("mechanism", "LR", "λ_max", "Adam ratio", "trace", "GN", "noise", "logit", "entropy")
    return Table("Sharpness and its companions", caption, header, tuple(body))


def _median(values: Column) -> Cell:
    known = values[values.notna()]
    if known.empty:
        return Cell("--")
    return Cell(power(float(known.median())), f"{power(float(known.min()))}–{power(float(known.max()))}" if len(known) > 1 else "")
