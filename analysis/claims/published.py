"""Judge the consensus paper's claims on its own printed numbers (`analysis.published`).

The rules are a study's, as far as one run each allows. Each number comes from one run without an interval, so the
verdicts concern the tables and not the mechanisms. "holds": every cell agrees. "contradicted": some cell disagrees;
these cells are named.
"""

from __future__ import annotations

from collections.abc import Iterator

from analysis import published
from analysis.claims.claim import Claim, Verdict, sentence, signed
from analysis.claims.windows import MARGIN
from analysis.numbers.windows import Window, window
from analysis.study.load import Frame
from analysis.words import join_words, lr_text, plural

CELL = ["table", "modality", "size", "lr"]


def claims() -> list[Claim]:
    """Return every claim from section 5 and annex D.3 that the printed tables can test."""
    nll, alpha = published.numbers(published.NLL), published.numbers(published.ALPHA_MAX)
    terminal, earliest = (alpha[alpha["phase"] == phase] for phase in ("terminal", "earliest"))
    return [
        *_windows(nll),
        *_mirrors(nll),
        _largest(terminal, "median_alpha_max", "SC attains the largest median α_max across all modalities and scales"),
        _largest(
            terminal, "percent_stable", "SC has the highest share of stable steps across all modalities and scales"
        ),
        _largest(earliest, "median_alpha_max", "The same at the earliest checkpoint (Table 8): largest median α_max"),
        _largest(
            earliest, "percent_stable", "The same at the earliest checkpoint (Table 8): highest share of stable steps"
        ),
        *_improves(published.numbers(published.ABLATION)),
    ]


def _curve(rows: Frame, mechanism: str, column: str) -> Window | None:
    one = rows[(rows["mechanism"] == mechanism) & rows[column].notna()]
    return window(one["lr"], one[column]) if len(one) else None


def _name(modality: str) -> str:
    return "DNA" if modality == "dna" else modality


def _grids(nll: Frame) -> Iterator[tuple[str, Frame]]:
    for (modality, size, component), rows in nll.groupby(["modality", "size", "component"], sort=False):
        yield f"{_name(modality)} {size}" + (f" {component}" if component else ""), rows


def _windows(nll: Frame) -> Iterator[Claim]:
    """Yield the wider window (5.1) for each grid with both mechanisms."""
    for wide, narrow in (("sc", "sa"), ("mix", "sa")):
        for column, words in (("validation_nll", "validation NLL"), ("generative_nll", "generative NLL")):
            for grid, rows in _grids(nll):
                # only common rates: a shorter grid must not look like a narrower window
                shared = rows.groupby("lr").filter(lambda of: {wide, narrow} <= set(of["mechanism"]))  # noqa: B023
                ours, theirs = (_curve(shared, each, column) for each in (wide, narrow))
                if ours is not None and theirs is not None:
                    yield _wider(f"{grid}, {words}", wide, narrow, ours, theirs)


def _span(name: str, found: Window) -> str:
    ends = _open_ends(found)
    told = f", open at the {join_words(ends)} end{'s' * (len(ends) > 1)}" if ends else ""
    width = f"{'at least ' if ends else ''}{found.width:.2f} decades"
    return f"{name} {width} ({lr_text(found.low.lr)} to {lr_text(found.high.lr)}{told})"


def _open_ends(found: Window) -> list[str]:
    return [end for end, is_open in (("low", found.open_low), ("high", found.open_high)) if is_open]


def _wider(where: str, wide: str, narrow: str, ours: Window, theirs: Window) -> Claim:
    """Return whether one window is wider within the printed rates; undecided if both fill them."""
    gap = ours.width - theirs.width
    both_open = ours.open_high and theirs.open_high and ours.open_low and theirs.open_low
    verdict = "undecided" if both_open or gap == 0 else "holds" if gap > 0 else "contradicted"
    spans = " and ".join(_span(name, each) for name, each in ((wide, ours), (narrow, theirs)))
    is_bound = verdict != "undecided" and _open_ends(theirs if gap > 0 else ours)
    beyond = " That is within the printed rates: beyond them the order may be another." if is_bound else ""
    text, statement = f"{sentence(where)}: {spans}.{beyond}", f"{wide} has a wider window than {narrow} ({where})"
    return Claim(f"window of {wide} and {narrow}, {where}", verdict, text, statement, 1, f"{signed(gap)} decades")


def _mirrors(nll: Frame) -> Iterator[Claim]:
    """Yield whether mix's best NLL is at most `MARGIN` above sa's (5.1), for each grid."""
    for column, words in (("validation_nll", "validation NLL"), ("generative_nll", "generative NLL")):
        for grid, rows in _grids(nll):
            best = rows.groupby("mechanism")[column].min()
            mix, sa = float(best["mix"]), float(best["sa"])
            text = f"{sentence(grid)}: the best {words} is {mix:.3f} for mix and {sa:.3f} for sa."
            verdict: Verdict = "holds" if mix / sa - 1 <= MARGIN else "contradicted"
            statement = f"mix mirrors sa at the best learning rate ({grid}, {words})"
            subject, effect = f"best of mix and sa, {grid}, {words}", f"{signed(100 * (mix / sa - 1), 1)} %"
            yield Claim(subject, verdict, text, statement, 1, effect)


def _largest(alpha: Frame, column: str, statement: str) -> Claim:
    """Return whether sc has the largest value in each (table, size, rate), ties included.

    A dash counts as the smallest value.
    """
    table = alpha.assign(value=alpha[column].fillna(0.0)).pivot_table(index=CELL, columns="mechanism", values="value")
    ahead = table["sc"] >= table.max(axis=1)
    others = [
        f"{_name(modality)} {size} at {lr_text(float(lr))} ({table.loc[(number, modality, size, lr)].idxmax()})"
        for number, modality, size, lr in table.index[~ahead]
    ]
    text = f"sc has it in {int(ahead.sum())} of {plural(len(table), 'cell')}"
    text += f"; another has in {join_words(others)}." if others else "."
    verdict = "holds" if ahead.all() else "contradicted"
    return Claim(
        column, verdict, f"{statement}: {text}", statement, len(table), f"{int(ahead.sum())} of {len(table)} cells"
    )


def _improves(ablation: Frame) -> Iterator[Claim]:
    """Yield whether a larger ξ, r or w lowers both NLLs at each step (D.3)."""
    for field, rows in ablation.groupby("field", sort=False):
        steps = rows.sort_values("value")[["validation_nll", "generative_nll"]].diff().dropna()
        falls = bool((steps < 0).all(axis=None))
        total = rows.sort_values("value")["validation_nll"]
        yield Claim(
            f"ablation {field}",
            "holds" if falls else "contradicted",
            f"From {field} {rows['value'].min()} to {rows['value'].max()} both NLLs fall at "
            f"{int((steps < 0).all(axis=1).sum())} of {len(steps)} steps.",
            f"A larger {field} improves validation and generative NLL",
            1,
            f"{float(total.iloc[-1] - total.iloc[0]):+.3f} nats".replace("-", "−"),
        )
