"""Judge whether consensus layers are low-pass filters (the consensus paper's section 2.2) on the spectra of their
learned graphs."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.claims.claim import Claim, Verdict
from analysis.numbers.spread import POSITIVE, Spread
from analysis.numbers.step_shares import TERMINAL
from analysis.numbers.windows import windows
from analysis.study.load import FINISHED, Frame, Study
from analysis.words import lr_text, plural

STATEMENT = (
    "{} filters without oscillation: its step η is at most 1/(2λ_max), so that higher frequencies shrink more (2.2)"
)


def low_pass_claims(study: Study) -> Iterator[Claim]:
    """Yield a claim for each series with consensus layers whose spectra were probed at its best learning rate."""
    if "spectra" not in study.probes:
        return
    finished = study.runs.loc[study.runs["status"].isin(FINISHED), "run_id"]
    rows = study.probed("spectra")
    rows = rows[(rows["phase"] == TERMINAL) & rows["run_id"].isin(finished) & rows["step_limit"].notna()]
    found = windows(study)
    for series in study.series:
        best = found[series].median
        own = rows[(rows["series"] == series) & (rows["run_lr"] == (best.best_lr if best else None))]
        if len(own):
            yield _claim(series, own)


def _claim(series: str, rows: Frame) -> Claim:
    """Judge one series from its heads at its best rate: per seed the median of 2ηλ_max over layers, heads and
    sequences."""
    per_seed = (rows["step_size"] / rows["step_limit"]).groupby(rows["seed"]).median()
    spread = Spread.of(per_seed, POSITIVE)
    gain, left = rows["gain"].median(), (rows["variance_after"] / rows["variance_before"]).median()
    numbers = (
        f"2ηλ_max = {spread.median:.2g}, median over layers, heads and {plural(spread.n, 'seed')} at "
        f"{lr_text(float(rows['run_lr'].iloc[0]))}; largest factor of a frequency {gain:.2g}; the layer leaves "
        f"{100 * left:.0f} % of the variance between positions"
    )
    effect, subject = f"2ηλ_max = {spread.median:.2g}", f"low-pass {series}"
    if spread.n < 3:
        text = f"On low-pass filtering by {series} no claim is made with {plural(spread.n, 'seed')} ({numbers})."
        return Claim(subject, "no claim", text, STATEMENT.format(series), spread.n, effect)
    verdict: Verdict = "holds" if spread.high <= 1 else "contradicted" if spread.low > 1 else "undecided"
    said = {
        "holds": "is a low-pass filter",
        "contradicted": "is no low-pass filter: its step overshoots at high frequencies",
        "undecided": "may or may not be a low-pass filter",
    }[verdict]
    interval = f"95 % interval over seeds {spread.low:.2g} to {spread.high:.2g}"
    text = f"The trained graph step of {series} {said} ({numbers}; {interval})."
    return Claim(subject, verdict, text, STATEMENT.format(series), spread.n, effect, interval)
