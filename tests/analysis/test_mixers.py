"""What the report says of mechanisms beside softmax attention, from studies whose numbers are worked out by hand."""

from __future__ import annotations

import json
import math

import matplotlib
import pandas as pd
import pytest

from analysis.claims import judging
from analysis.claims.mixers import reading, say_span
from analysis.drawing.style import RC
from analysis.numbers.mixers import edge_by_nll, edge_by_verdict, groups, numbers_of
from analysis.numbers.windows import windows
from analysis.report import build, summary
from analysis.sections.mixers import figures, mixer_tables
from analysis.study.load import load
from tests.analysis.synthetic import write_study, write_table
from tests.analysis.test_report import text_of

LRS = (1e-3, 1e-2, 1e-1)
# the threshold of a best NLL of 2.0 is 2.1: by interpolation between two rates a decade apart the edge is known
SA, HIGHER, LOWER = (2.2, 2.0, 2.6), (2.2, 2.0, 2.2), (2.2, 2.0, 4.1)
LOST = (2.2, 2.0, math.inf)
KINDS = {
    "sa": SA,
    "sigmoid": LOST,
    "sigmoid norm=after": HIGHER,
    "gated_softmax": HIGHER,
    "gated_softmax gate=headwise": LOWER,
}


def write_mixers(folder, kinds=KINDS, *, seeds=3, shift=lambda kind, seed: 0.001 * seed, name="mixers"):
    """Write a study of several kinds of mechanism, a base and its variants, as an ablation leaves them."""
    parts = []
    for place, (kind, valley) in enumerate(kinds.items()):
        mechanism, _, variant = kind.partition(" ")

        def nll(_mechanism, lr, seed, kind=kind, valley=valley):
            return valley[LRS.index(lr)] + shift(kind, seed)

        parts.append(
            write_study(
                folder / str(place), name=name, mechanisms=[mechanism], lrs=LRS, seeds=seeds, nll=nll,
                alpha=lambda _mechanism, lr, seed, _state: [lr * (2 + seed)], states=("checkpoint",),
                settings=({"variant": variant},),
            )
        )  # fmt: skip
    target = folder / "studies" / name
    (target / "results").mkdir(parents=True)
    for table in ("runs", "curvature", "curves"):
        frame = pd.concat([pd.read_parquet(part / "results" / f"{table}.parquet") for part in parts], ignore_index=True)
        if table == "runs":
            frame["step_s"] = 0.025 - 0.015 * (frame["mechanism"] == "sa")
        write_table(target / "results" / f"{table}.parquet", table, frame.to_dict("records"))
    (target / "study.json").write_text((parts[0] / "study.json").read_text())
    return target


def measured_side_by_side(study, series, turns=8):
    rows = [
        {"run_id": "x", "series": name, "num_params": 1, "tokens_per_step": 512,
         "seconds": [0.01 * (1 + place)] * turns, "peak_bytes": 2**20 * (1 + place)}
        for place, name in enumerate(series)
    ]  # fmt: skip
    record = {"version": 1, "device": "CPU, 1 thread", "machine": "a machine", "rows": rows}
    (study / "results" / "throughput.json").write_text(json.dumps(record))


def edge(valley):
    """Return log10 of the rate at which a valley's NLL passes 2.1, on the line between its last two rates."""
    return -2 + (2.1 - valley[1]) / (valley[2] - valley[1])


def statements(folder):
    return {claim.statement: claim for claim in judging.judge(load(folder)) if claim.paper}


def test_edges_are_those_worked_out_by_hand(tmp_path):
    study = load(write_mixers(tmp_path, shift=lambda kind, seed: 0.0))
    assert edge_by_nll(study, windows(study)["sa"]) == {seed: pytest.approx((edge(SA), edge(SA))) for seed in range(3)}
    assert edge(SA) == pytest.approx(-2 + 1 / 6) and edge(HIGHER) == pytest.approx(-1.5)
    assert edge_by_nll(study, windows(study)["sigmoid"]) == {seed: pytest.approx((-2, -1)) for seed in range(3)}, (
        "next to a divergence"
    )
    assert edge_by_verdict(study, "sigmoid") == {seed: pytest.approx((-2, -1)) for seed in range(3)}
    assert edge_by_verdict(study, "sa") == {seed: pytest.approx((-1, math.inf)) for seed in range(3)}


def test_a_seed_without_a_stable_rate_has_no_edge_and_a_missing_one_says_nothing(tmp_path):
    folder = write_mixers(tmp_path, KINDS | {"sigmoid": (math.inf,) * 3})
    path = folder / "results" / "runs.parquet"
    runs = pd.read_parquet(path)
    runs.loc[(runs["mechanism"] == "sigmoid") & (runs["seed"] == 0) & (runs["lr"] == 1e-3), "status"] = "failed"
    write_table(path, "runs", runs.to_dict("records"))
    study, never = load(folder), (-math.inf, -math.inf)
    by_nll = edge_by_nll(study, windows(study)["sigmoid"])
    assert by_nll == edge_by_verdict(study, "sigmoid") == {1: never, 2: never}


def test_the_claims_of_the_annexes_are_computed(tmp_path):
    """Edges: sa 10^(−2 + 1/6); the elementwise gate 10^−1.5, 2.15 times that; the headwise one 10^(−2 + 1/21)."""
    found = statements(write_mixers(tmp_path, shift=lambda kind, seed: 0.0))
    needs = "Sigmoid attention needs a norm after it (annex B.1.2): with one"
    by_nll = "Gating tolerates learning rates 30 % higher (annex D.7): the rate at which the NLL leaves 5 % of the best"
    by_verdict = "Gating tolerates learning rates 30 % higher (annex D.7): the largest rate that ended stable"
    assert {statement: (claim.verdict, claim.n) for statement, claim in found.items()} == {
        # a norm's edge is known, 10^−1.5; without it lies between 10^−2 and 10^−1, for it diverged there
        f"{needs}, larger rates are stable": ("undecided", 3),
        f"{needs}, the best NLL is lower": ("undecided", 3),
        # both edges lie between the same two rates, a decade apart
        f"{by_nll}, gated_softmax": ("unresolved", 3),
        f"{by_nll}, gated_softmax gate=headwise": ("unresolved", 3),
        f"{by_verdict}, gated_softmax": ("undecided", 3),
        # it learned nothing at 10^−1, where sa ended stable
        f"{by_verdict}, gated_softmax gate=headwise": ("contradicted", 3),
    }
    gate = found[f"{by_nll}, gated_softmax"]
    assert gate.effect == f"×{10 ** (1 / 3):.2f}" and gate.interval == "95 %: ×2.15 to ×2.15"
    # a third of a decade less log10(1.3) is 0.219; two brackets of a decade, halved three and four times, sum up to 0.1875
    assert gate.text.startswith("Not resolved by this grid: lr=edge needs about 21 more runs. Measured (n = 3): ")
    assert "largest stable learning rate of gated_softmax over sa's, 1.3 times is claimed" in gate.text


def test_a_norm_is_needed_where_the_edge_lies_lower_without_it(tmp_path):
    kinds = KINDS | {"sigmoid": LOWER}
    found = statements(write_mixers(tmp_path, kinds, shift=lambda kind, seed: 0.0))
    claim = next(each for statement, each in found.items() if "larger rates are stable" in statement)
    assert claim.verdict == "unresolved" and claim.effect == f"×{10 ** (edge(HIGHER) - edge(LOWER)):.2f}"
    kinds = {"sa": SA, "sigmoid": (2.0, 4.1, 4.1), "sigmoid norm=after": (2.2, 2.0, 4.1)}  # whole decades apart
    folder = write_mixers(tmp_path / "apart", kinds, shift=lambda kind, seed: 0.0)
    assert next(iter(statements(folder).values())).verdict == "holds"
    swapped = write_mixers(
        tmp_path / "swapped", {"sa": SA, "sigmoid": (2.2, 2.0, 4.1), "sigmoid norm=after": (2.0, 4.1, 4.1)}
    )
    assert next(iter(statements(swapped).values())).verdict == "contradicted"
    base_has_it = write_mixers(
        tmp_path / "base", {"sa": SA, "sigmoid": (2.2, 2.0, 4.1), "sigmoid norm=none": (2.0, 4.1, 4.1)}
    )
    assert next(iter(statements(base_has_it).values())).verdict == "holds", "the base is the one with the norm"


def test_a_gate_that_learns_less_needs_the_edge_at_an_equal_share_of_the_learning(tmp_path):
    """5 % of a best NLL of 2.8 is never left; 8 % of its learning, as much as 5 % is for sa, is left below 10^−2."""
    kinds = {"sa": (2.0, 4.1, 4.1), "gated_softmax": (2.8, 2.93, 2.93)}
    found = statements(write_mixers(tmp_path, kinds, shift=lambda kind, seed: 0.0))
    claim = next(each for statement, each in found.items() if "5 % of the best" in statement)
    ratio = 10 ** ((0.4 / 12) / 0.13 - 0.1 / 2.1)
    assert claim.effect.startswith("×89.62 to ×") and claim.verdict == "unresolved", "within one bracket of a decade"
    assert claim.interval == f"at an equal share 95 %: ×{ratio:.2f} to ×{ratio:.2f}"
    assert f"At an equal share of what was learned (8 %): ×{ratio:.2f} (95 %: ×{ratio:.2f}" in claim.text


@pytest.mark.parametrize(
    ("ends", "told"),
    [((-math.inf, math.inf), "any ratio"), ((0.0, math.inf), "×1.00 to ×∞"), ((-1.0, 0.5), "×0.10 to ×3.16")],
)
def test_a_ratio_of_which_nothing_is_known_is_any(ends, told):
    """Neither of two gates had a rate that is too large: ×0 to ×∞ was printed, and its interval too."""
    assert say_span(ends) == told


def test_without_a_norm_every_run_diverges(tmp_path):
    found = statements(write_mixers(tmp_path, KINDS | {"sigmoid": (math.inf,) * 3}))
    (claim,) = (each for statement, each in found.items() if "B.1.2" in statement)
    assert claim.verdict == "not judged" and claim.text.endswith(": of sigmoid every run diverged.")
    assert claim.statement.endswith("with one, larger rates are stable")
    # one seed of three, which leaves a median to be judged by
    lost = lambda kind, seed: math.inf if (kind, seed) == ("sigmoid", 0) else 0.001 * seed  # noqa: E731
    kinds = {"sa": SA, "sigmoid": LOWER, "sigmoid norm=after": HIGHER}
    claim = next(iter(statements(write_mixers(tmp_path / "one", kinds, shift=lost)).values()))
    assert "In 1 seed one of the two has none at all." in claim.text
    assert (claim.verdict, claim.n, claim.p) == ("undecided", 3, 0.25), "three signs that agree are no result"
    assert claim.interval.startswith("range: ") and "×∞" in claim.interval


@pytest.mark.parametrize(("seeds", "verdict"), [(1, "no claim"), (2, "unresolved")])
def test_one_seed_makes_no_claim_and_two_make_indications(tmp_path, seeds, verdict):
    found = statements(write_mixers(tmp_path, seeds=seeds))
    claim = next(each for statement, each in found.items() if "5 % of the best, gated_softmax" in statement)
    assert (claim.verdict, claim.n) == (verdict, seeds)
    assert ("No claim: one seed" in claim.text) == (seeds == 1)


def test_seeds_that_disagree_leave_a_claim_undecided(tmp_path):
    """At one seed the gate's edge is far above, at the two others at the plain one's."""
    steep = {0: -0.4, 1: 0.4, 2: 0.4}
    write = write_mixers(
        tmp_path,
        {"sa": SA, "gated_softmax": SA},
        shift=lambda kind, seed: 0.0,
    )
    path = write / "results" / "runs.parquet"
    runs = pd.read_parquet(path)
    top = (runs["mechanism"] == "gated_softmax") & (runs["lr"] == 1e-1)
    runs.loc[top, "val_nll"] += runs.loc[top, "seed"].map(steep)
    write_table(path, "runs", runs.to_dict("records"))
    claim = next(each for statement, each in statements(write).items() if "5 % of the best" in statement)
    assert claim.verdict == "undecided" and claim.text.startswith("Undecided: needs more than 100 seeds")
    assert edge_by_nll(load(write), windows(load(write))["gated_softmax"])[0] == pytest.approx((-1.5, -1.5))


def test_the_reading_counts_divergences_first_and_leaves_comparisons_to_the_table(tmp_path):
    texts = reading(load(write_mixers(tmp_path)))
    assert texts[0] == (
        "Of 45 runs, 3 diverged: sigmoid 3 of 9 (3/3 at 0.1). None of sa, gated_softmax, gated_softmax gate=headwise "
        "and sigmoid norm=after."
    )
    whole = " ".join(texts)
    assert "against sa" not in whole and "uncorrected" not in whole


def test_what_learned_too_little_is_named_and_has_no_window(tmp_path):
    flat = (9.0, 8.9, 9.0)  # above what the tokens' frequencies alone would give: as wide a window as there are rates
    study = load(write_mixers(tmp_path, {"sa": SA, "sigmoid": flat, "gated_softmax": HIGHER}))
    assert "sigmoid learned too little." in reading(study)
    row = {row[0].text: row[4].text for row in mixer_tables(study)[0].rows}
    assert row["sigmoid"] == "learned nothing" and row["gated_softmax"] == "1.00"


def test_tables_hold_windows_and_costs(tmp_path):
    folder = write_mixers(tmp_path)
    windows, costs = mixer_tables(load(folder))
    row = {row[0].text: [cell.text for cell in row] for row in windows.rows}
    assert row["sa"][1:4] == ["0/9", "1e-2", "2.001"] and row["sigmoid"][1] == "3/9"
    # below, from 10^−2.5 (2.2 to 2.0 over a decade); above, edge(SA)
    assert float(row["sa"][4]) == pytest.approx(0.5 + 1 / 6, abs=0.01)
    assert float(row["sa"][6]) == pytest.approx(3.0), "α_max over the rate: 2, 3 and 4"
    cells = {row[0].text: row for row in costs.rows}
    assert cells["sa"][1].text == "247,872" and cells["sigmoid"][1].detail == f"{250000 / 247872:.2f}"
    assert cells["sigmoid"][2].text == "2.50" and cells["sigmoid"][3].text == "--"
    assert "the runs do not record what a step holds" in costs.caption
    series = load(folder).series
    measured_side_by_side(folder, series)
    _, costs = mixer_tables(load(folder))
    place = series.index("sigmoid")
    cell = next(row for row in costs.rows if row[0].text == "sigmoid")
    assert cell[2].text == f"{1 + place:.2f}" and (cell[3].text, cell[3].detail) == (
        f"{1 + place:.1f}",
        f"{1 + place:.2f}",
    )
    assert series[0] == "sa" and costs.rows[0][2].detail == "10.0 ms" and "CPU, 1 thread" in costs.caption


def test_a_best_nll_above_the_untrained_ones_is_called_exploded(tmp_path):
    kinds = {"sa": KINDS["sa"], "sigmoid": tuple(1e9 * value for value in KINDS["sa"])}
    windows = mixer_tables(load(write_mixers(tmp_path, kinds)))[0]
    cells = {row[0].text: row[windows.header.index("NLL")] for row in windows.rows}
    assert cells["sigmoid"].text == "exploded" and "e9" in cells["sigmoid"].detail and cells["sa"].text == "2.001"


def test_the_section_stands_in_the_report_and_in_what_a_sweep_prints(tmp_path, drawn):
    drawn("mixers")
    folder = write_mixers(tmp_path)
    pdf = text_of(build(folder, tmp_path / "reports"))
    assert pdf.count("Mechanisms beside softmax attention") == 2, "in the contents, and as a heading"
    printed = summary(folder)
    assert "Mechanisms: what each costs" in printed and "cannot be judged" not in printed, "nothing is said of sc"
    assert "a billion parameters and more" in " ".join(printed.split())
    with matplotlib.rc_context(RC):
        (drawn,) = figures(load(folder)).values()
    assert [ax.get_title(loc="left").replace("\n", " ") for ax in drawn.figure.axes] == [
        each.name for each in numbers_of(load(folder), groups(load(folder))[0]).values()
    ]


def test_what_other_sections_compare_has_none(tmp_path):
    folder = write_study(tmp_path, mechanisms=["sa", "sc", "mix", "sw", "attentionx"])
    assert groups(load(folder)) == [] and "beside softmax attention" not in summary(folder)
    alone = write_study(tmp_path / "alone", mechanisms=["sigmoid"])
    assert groups(load(alone)) == [], "without sa there is nothing to compare with"


def test_groups_differ_in_their_mechanism_alone(tmp_path):
    settings = ({"norm": "layernorm"}, {"norm": "rmsnorm"})
    folder = write_study(tmp_path, mechanisms=["sa", "fox"], settings=settings)
    study = load(folder)
    assert groups(study) == [("sa layernorm", "fox layernorm"), ("sa rmsnorm", "fox rmsnorm")]
    titles = [table.title for table in mixer_tables(study)]
    assert titles[0].endswith("(layernorm)") and titles[2].endswith("(rmsnorm)")
    assert any(text.startswith("rmsnorm: ") for text in reading(study))


def test_what_is_kept_of_a_sequence_is_a_column_where_it_is_recorded(tmp_path):
    folder = write_mixers(tmp_path, {"sa": SA, "fox": HIGHER, "sc": LOWER})
    costs = mixer_tables(load(folder))[1]
    assert costs.header == ("mechanism", "parameters", "time of a step", "memory (MB)"), "nobody recorded it"
    file = folder / "results" / "runs.parquet"
    frame = pd.read_parquet(file)
    frame["state_bytes"] = frame["mechanism"].map({"sa": 4096.0, "fox": 6144.0, "sc": None})
    write_table(file, "runs", frame.to_dict("records"))
    costs = mixer_tables(load(folder))[1]
    assert costs.header[-1] == "state (KiB)" and "below it over sa's" in costs.caption
    cells = {row[0].text: (row[-1].text, row[-1].detail) for row in costs.rows}
    assert cells == {"sa": ("4.0", "1.00"), "fox": ("6.0", "1.50"), "sc": ("--", "")}
    frame["state_bytes"] = frame["mechanism"].map({"sa": None, "fox": 6144.0, "sc": None})
    write_table(file, "runs", frame.to_dict("records"))
    costs = mixer_tables(load(folder))[1]
    assert {row[0].text: row[-1].detail for row in costs.rows} == {"sa": "", "fox": "", "sc": ""}, "over nothing known"


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_what_the_annexes_say_of_recurrent_mixers_is_judged_by_the_best_nll_of_a_language_model(tmp_path, direction):
    valleys = dict.fromkeys(("sa", "gla", "mamba2", "hgrn2"), SA)
    valleys |= {"gated_deltanet": (2.0, 1.8, 2.0), "gla": (2.2, 2.1, 2.6)}
    folder = write_mixers(tmp_path, valleys, shift=lambda kind, seed: 0.001 * seed)
    told = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(told | {"words": {"direction": direction}}))
    study = load(folder)
    found = {claim.subject: claim for claim in judging.judge(study) if "annex D" in claim.statement}
    if direction == "bidirectional":
        assert not found, "the annexes speak of models that read from left to right"
        return
    assert {key: claim.verdict for key, claim in found.items()} == {
        "best NLL gated_deltanet beside gla": "holds",
        "best NLL gated_deltanet beside mamba2": "holds",
        "best NLL hgrn2 beside mamba2": "undecided",
        "best NLL hgrn2 beside sa": "undecided",
    }
    assert found["best NLL gated_deltanet beside gla"].effect == "−0.300"


def test_a_base_that_is_made_of_others_is_told_by_what_it_is_made_of(tmp_path):
    kinds = {"sa": SA, "mix": HIGHER, "mix pattern=[fox,sa]": LOWER, "sigmoid": LOWER, "sigmoid norm=after": LOWER}
    folder = write_mixers(tmp_path, kinds)
    ablations = [
        {
            "axis": "mechanism", "part": "mix", "setting": "pattern",
            "values": [
                {"value": ["gla", "sa"], "variant": ""}, {"value": ["fox", "sa"], "variant": "pattern=[fox,sa]"}
            ],
        },
        {
            "axis": "mechanism", "part": "sigmoid", "setting": "norm",
            "values": [{"value": "none", "variant": ""}, {"value": "after", "variant": "norm=after"}],
        },
    ]  # fmt: skip
    told = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(told | {"ablations": ablations}))
    study = load(folder)
    names = [each.name for each in numbers_of(study, groups(study)[0]).values()]
    assert {*names} == {"sa", "mix pattern=[gla,sa]", "mix pattern=[fox,sa]", "sigmoid", "sigmoid norm=after"}
