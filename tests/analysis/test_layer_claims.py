"""The verdicts on connectivity and on the conditioning of W_qᵀW_k, from made-up tables with a known answer."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.claims.judging import claims_table, judge
from analysis.claims.layers import connectivity_claims
from analysis.sections import sentences
from analysis.sections.connectivity_figures import bounds_sentence
from analysis.study.load import load
from stability.runs import results
from tests.analysis.synthetic import write_study, write_table

LRS = (1e-3, 1e-2, 1e-1)
NOISE = (-0.02, 0.0, 0.02)  # a seed's own slope beside the common one


def graphs(low, high, *, value=1.0):
    """Four window paths and four cycles with λ_1 = ``value``."""
    rows = [(kind, 2**n, 1, value, low, high) for kind in ("window", "cycle") for n in range(4)]
    return pd.DataFrame(rows, columns=results.GRAPH_COLUMNS["connectivity"])


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.5, 2.0, "holds"), (1.0, 1.0, "holds"), (2.0, 4.0, "contradicted"), (0.25, 0.5, "contradicted")],
)
def test_one_value_beyond_a_bound_refutes_it(low, high, verdict):
    frame = graphs(0.5, 2.0)
    frame.loc[0, ["bound_low", "bound_high"]] = (low, high)
    path = {claim.subject: claim for claim in connectivity_claims({"connectivity": frame})}["connectivity window"]
    within = 4 if verdict == "holds" else 3
    assert (path.verdict, path.n, path.effect) == (verdict, 4, f"{within} of 4 within")
    told = bounds_sentence({"connectivity": frame})
    assert told == f"λ_1 lies within the paper's bounds for 4 of 4 cycle powers and {within} of 4 window paths."


def test_rounding_is_no_counterexample_and_a_millionth_is():
    for value, verdict in ((1 + 1e-10, "holds"), (1 - 1e-10, "holds"), (1 + 1e-6, "contradicted")):
        assert {claim.verdict for claim in connectivity_claims({"connectivity": graphs(1, 1, value=value)})} == {
            verdict
        }
    assert connectivity_claims({}) == [] and bounds_sentence({}) == ""


def test_learned_graphs_are_counted_by_head_and_softmax_is_none():
    row = dict.fromkeys(results.PROBE_COLUMNS["spectra"])
    heads = [row | {"fiedler": value, "fiedler_low": 0.1, "fiedler_high": 0.4} for value in (0.1, 0.2, 0.5)]
    (claim,) = connectivity_claims({"spectra": pd.DataFrame([*heads, row])})
    assert (claim.verdict, claim.n) == ("contradicted", 3)
    assert claim.text.startswith("Not supported (n = 3): λ_1 lies within the paper's bounds for 2 of 3 learned graphs.")


@pytest.mark.parametrize(("high", "is_said"), [(2.0, False), (0.5, True)])
def test_the_first_page_says_nothing_of_a_theorem_unless_it_is_refuted(quickstart, monkeypatch, high, is_said):
    bounds = connectivity_claims({"connectivity": graphs(0.5, high)})
    before = sentences.sentences(quickstart)
    judged = judge(quickstart)
    monkeypatch.setattr(sentences, "judge", lambda study: [*judged, *bounds])
    assert any("λ_1" in each for each in sentences.sentences(quickstart)) == is_said
    assert is_said or sentences.sentences(quickstart) == before


def conditioned(tmp_path, slope, *, seeds=3):
    """A study whose attention has heads of condition 10·(lr/1e-3)^slope, one of three far off."""
    folder = write_study(tmp_path, mechanisms=["sa", "sc"], lrs=LRS, seeds=seeds)
    table = pd.read_parquet(folder / "results" / "runs.parquet")
    rows = []
    for run in table[table.mechanism == "sa"].itertuples():
        row = {"run_id": run.run_id, "phase": "terminal", "lr": run.lr, "layer": 0, "mixer": "sa"}
        condition = 10 * (run.lr / 1e-3) ** (slope + NOISE[run.seed])
        rows += [
            row | {"head": head, "index": index, "singular_value": value}
            for head, largest in enumerate((condition, condition, 1e6))
            for index, value in enumerate((largest, 1.0))
        ]
    write_table(folder / "results" / "qk.parquet", "qk", rows)
    return load(folder)


@pytest.mark.parametrize(("slope", "verdict"), [(0.5, "holds"), (-0.5, "contradicted"), (0.0, "undecided")])
def test_conditioning_is_judged_by_the_slope_over_the_rate(tmp_path, slope, verdict):
    study = conditioned(tmp_path, slope)
    (claim,) = [claim for claim in judge(study) if claim.subject == "conditioning sa"]
    assert (claim.verdict, claim.n) == (verdict, 3)
    assert claim.differences == pytest.approx([slope + each for each in NOISE])
    table = claims_table(study)
    assert table is not None and any("ill-conditioned" in row[0].text for row in table.rows)


def test_one_seed_makes_no_claim_on_conditioning(tmp_path):
    (claim,) = [claim for claim in judge(conditioned(tmp_path, 0.5, seeds=1)) if claim.subject == "conditioning sa"]
    assert claim.verdict == "no claim"
