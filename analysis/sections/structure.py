"""Show a structure tokenizer's error on held-out chains, from its ``results`` folder.

A table, and a figure with a backbone beside its reconstruction.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.drawing.pieces import Pieces, heading, shown
from analysis.drawing.style import INK, MUTED, RC, WIDTH_INCHES
from analysis.drawing.typeset import Cell, Table
from analysis.sections.section import Captioned, Drawn, Figures, Section, is_of_rates, pictures
from analysis.study.load import Column, Frame, Study

ORIGINAL, RECONSTRUCTED, BASELINE = "#0072B2", "#D55E00", "#6B6B6B"
ALPHA_CARBON = 1
SCHEMA = 1
TOKENIZER = "tokenizer"
CAPTION = (
    "Above: α carbons of the chain of median RMSD, original, and reconstructed from its tokens (original faint). "
    "Below: backbone RMSD of all held-out chains, against the training chains' mean backbone and one chain of mean "
    "geometry; how often each code is used."
)
RMSDS = {
    "rmsd": "backbone RMSD, reconstructed",
    "atom_rmsd": "heavy-atom RMSD, stage 2",
    "ideal_rmsd": "baseline: one chain of mean geometry",
    "mean_rmsd": "baseline: the training chains' mean",
    "point_rmsd": "baseline: every atom at the centroid",
}


def load_results(folder: Path) -> tuple[dict[str, Any], pd.DataFrame, pd.DataFrame]:
    """Read the results: (summary, one row per chain, one row per token).

    Raises:
        ValueError: the folder has no measurement of this version.
    """
    if not (folder / "summary.json").exists():
        raise ValueError(f"no summary.json in {folder}; python -m stability.train_tokenizer writes it at its end")
    summary = json.loads((folder / "summary.json").read_text())
    if summary["schema"] != SCHEMA:
        raise ValueError(
            f"{folder} holds results of version {summary['schema']}, this is version {SCHEMA}; move it away and run "
            "the same command again"
        )
    return summary, pd.read_parquet(folder / "chains.parquet"), pd.read_parquet(folder / "codes.parquet")


def table(folder: Path) -> str:
    """Return the summary as lines of text; RMSDs as mean ± standard error over chains."""
    summary, chains, _ = load_results(folder)
    lines = [
        f"{summary['num_chains']} held-out chains, {summary['num_residues']} residues (of each chain the first "
        f"{summary['positions']} at most); trained on {summary['num_train_chains']} chains, mechanism "
        f"{summary['mechanism']}, frame {summary['frame']}"
    ]
    for label, values in _rmsds(chains):
        error = f"± {values.sem():.2f}" if len(values) > 1 else ""
        lines.append(f"  {label:38} {values.mean():6.2f} {error} Å, median {values.median():.2f}")
    share = 100 * summary["used_codes"] / summary["num_codes"]
    lines.append(
        f"  {'codes used':38} {summary['used_codes']} of {summary['num_codes']} ({share:.0f} %), perplexity "
        f"{summary['perplexity']:.0f}"
    )
    lines.append(
        f"  {'same tokens when rotated and shifted':38} {100 * summary['same_tokens']:.2f} % of positions, "
        f"{summary['rotations']} rotations a chain; of the worst chain {100 * chains.same_tokens.min():.0f} %"
    )
    return "\n".join(lines)


def applies(study: Study) -> bool:
    """Return whether the study's structure tokenizer was measured."""
    return is_of_rates(study) and study.tokenizer is not None


def figures(study: Study) -> Figures:
    if study.tokenizer is None:
        return {}
    summary, _, _ = load_results(study.tokenizer)
    about = (
        f"Tokenizer {study.tokenizer.parent.name}, mechanism {summary['mechanism']}, frame {summary['frame']}, trained "
        f"on {summary['num_train_chains']} chains, measured on {summary['num_chains']} held-out ones (of each the "
        f"first {summary['positions']} residues at most). "
    )
    return {TOKENIZER: Captioned(structure_figure(study.tokenizer), about + CAPTION)}


def body(study: Study, drawn: Drawn) -> Pieces:
    """Report the structure tokens' error in atom positions."""
    assert study.tokenizer is not None, "the section applies"
    summary, chains, _ = load_results(study.tokenizer)
    rows = [
        (Cell(label), Cell(f"{values.mean():.2f}", f"± {values.sem():.2f}"), Cell(f"{values.median():.2f}"))
        for label, values in _rmsds(chains)
    ]  # fmt: skip
    used = f"{summary['used_codes']:,} of {summary['num_codes']:,} codes used, perplexity {summary['perplexity']:.0f}. "
    same = f"Turned and shifted at random, {100 * summary['same_tokens']:.1f} % of positions keep their token. "
    rest = "RMSD in Å after superposition; second line: standard error of the mean over chains."
    found = Table("Reconstruction of held-out chains", used + same + rest, ("", "mean", "median"), tuple(rows))
    return heading("The structure tokenizer") + pictures(drawn) + shown([found])


def _rmsds(chains: Frame) -> list[tuple[str, Column]]:
    return [(label, chains[name].dropna()) for name, label in RMSDS.items() if chains[name].notna().any()]


def structure_figure(folder: Path) -> Figure:
    """Draw the backbone at median RMSD, original and reconstructed; all chains' RMSD; each code's frequency."""
    summary, chains, codes = load_results(folder)
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(WIDTH_INCHES, 4.6), layout="constrained")
        grid = figure.add_gridspec(2, 2, height_ratios=(1.5, 1.0))
        with np.load(folder / "example.npz") as example:
            _backbones(figure, grid, example)
        _rmsd_panel(figure.add_subplot(grid[1, 0]), chains)
        _codes_panel(figure.add_subplot(grid[1, 1]), codes, summary)
    return figure


def write(folder: Path, path: Path) -> Path:
    """Write the figure as PDF, PNG or SVG, by the path's ending; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(RC):
        structure_figure(folder).savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=200)
    return path


def _backbones(figure: Figure, grid: Any, example: Any) -> None:
    """Draw α carbons as lines, broken at missing residues; the same axes left and right."""
    mask_N = example["mask_N"]
    traces = [
        np.where(mask_N[:, None], example[name][:, ALPHA_CARBON], np.nan)
        for name in ("original_NAX", "reconstructed_NAX")
    ]
    middle_X, radius = np.nanmean(traces[0], 0), np.nanmax(np.abs(traces[0] - np.nanmean(traces[0], 0)))
    titles = (f"{example['chain']}, original", f"reconstructed, RMSD {float(example['rmsd']):.2f} Å")
    for column, (title, traces_shown) in enumerate(zip(titles, ((0,), (0, 1)), strict=True)):
        ax: Any = figure.add_subplot(grid[0, column], projection="3d")
        for index in traces_shown:
            look = {"linewidth": 1.0, "alpha": 0.35} if column == 1 and index == 0 else {"linewidth": 1.6, "alpha": 1.0}
            ax.plot(*traces[index].T, color=(ORIGINAL, RECONSTRUCTED)[index], **look)
        ax.set_title(title)
        ax.set(xlim=_around(middle_X[0], radius), ylim=_around(middle_X[1], radius), zlim=_around(middle_X[2], radius))
        ax.set_box_aspect((1, 1, 1), zoom=1.55)
        ax.set_axis_off()


def _around(middle: float, radius: float) -> tuple[float, float]:
    return middle - radius, middle + radius


def _rmsd_panel(ax: Axes, chains: pd.DataFrame) -> None:
    """Draw held-out chains' cumulative distribution of backbone RMSD in Å, with both baselines."""
    for name, color, dashes, label in (
        ("rmsd", RECONSTRUCTED, "-", "reconstructed"),
        ("mean_rmsd", BASELINE, "-", "mean chain"),
        ("ideal_rmsd", BASELINE, ":", "mean geometry"),
    ):
        ordered = np.sort(chains[name])
        shares = np.arange(1, len(ordered) + 1) / len(ordered)
        ax.step(ordered, shares, where="post", color=color, linestyle=dashes, label=label)
    ax.set_xscale("log")
    ax.set(xlabel="backbone RMSD (Å)", ylabel="share of held-out chains", ylim=(0, 1.02))
    ax.legend(
        loc="lower center", bbox_to_anchor=(0.45, 0.98), ncols=3, fontsize=7.5, handlelength=1.4, columnspacing=1.0
    )


def _codes_panel(ax: Axes, codes: pd.DataFrame, summary: dict[str, Any]) -> None:
    """Draw used codes' shares of residues by rank, with the uniform share dotted."""
    counts = np.sort(codes.num.to_numpy())[::-1]
    used = counts[counts > 0]
    ax.plot(np.arange(1, len(used) + 1), used / used.sum(), color=INK)
    ax.axhline(1 / summary["num_codes"], color=MUTED, linestyle=":", linewidth=0.9)
    ax.set(xscale="log", yscale="log", ylabel="share of residues")
    ax.set_xlabel(f"code, by frequency ({len(used)} of {summary['num_codes']} used)")
    ax.set_title(f"perplexity {summary['perplexity']:.0f}; dotted: uniform", fontsize=8.5)


SECTION = Section(body, applies, figures)
