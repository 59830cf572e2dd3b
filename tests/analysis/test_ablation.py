"""The ablation's table in the paper's form, its figure and its sentences, from a study with made-up numbers."""

import json
import math
import re

import matplotlib
import numpy as np
import pyarrow.parquet as pq
import pytest

from analysis import assembly
from analysis.claims import judging as claims
from analysis.drawing.style import RC
from analysis.numbers.ablations import ablations
from analysis.numbers.common_windows import rank_variants
from analysis.report import build, summary
from analysis.sections import ablation, curves, headline, nll_figures
from analysis.sections.headline import answer_table, best_series, title
from analysis.sections.sentences import sentences
from analysis.study.load import load
from analysis.study.reference import references
from tests.analysis.synthetic import UNIGRAM, write_study, write_table
from tests.analysis.test_report import text_of

VALUES = {"edge_hidden": (4, 256), "rank": (1, 4, 8), "window": (2, 4)}
BASE = {"edge_hidden": 256, "rank": 4, "window": 2}
LABELS = ("", *(f"{setting}={value}" for setting, row in VALUES.items() for value in row if value != BASE[setting]))
# What each value adds to the base's NLL: ξ and r help as in the paper, w does not.
SHIFTS = {"": 0.0, "edge_hidden=4": 0.2, "rank=1": 0.1, "rank=8": -0.1, "window=4": 0.3}


def nll(label, lr, seed):
    return (
        2.5
        + SHIFTS[label]
        + 0.01 * seed
        + (0.2 if lr == 1e-2 and label != "rank=8" else 0.05 if lr == 1e-3 and label == "rank=8" else 0.0)
    )


def write_ablation(folder, *, nll=nll, mechanisms=("sc",), lrs=(1e-3,), seeds=3, gen_nll=lambda _label, _seed: None):
    """A study of sc (the others at their base), as a sweep with `ablate` leaves it."""
    path = write_study(
        folder, mechanisms=mechanisms, lrs=lrs, seeds=seeds, settings=[{"variant": label} for label in LABELS]
    )
    table = path / "results" / "runs.parquet"
    rows = [row for row in pq.read_table(table).to_pylist() if row["mechanism"] == "sc" or not row["variant"]]
    for row in rows:
        if row["mechanism"] == "sc":
            value = nll(row["variant"], row["lr"], row["seed"])
            row |= {
                "status": "stable" if math.isfinite(value) else "diverged",
                "val_nll": value if math.isfinite(value) else None,
            }
            row |= {
                "gen_nll": gen_nll(row["variant"], row["seed"]),
                "num_params": 606_432 if row["variant"] in ("", "window=4") else 1_395_936,
            }
    write_table(table, "runs", rows)
    manifest = json.loads((path / "study.json").read_text())
    described = [
        {
            "axis": "mechanism",
            "part": "sc",
            "setting": setting,
            "values": [{"value": v, "variant": "" if v == BASE[setting] else f"{setting}={v}"} for v in row],
        }
        for setting, row in VALUES.items()
    ]
    (path / "study.json").write_text(json.dumps(manifest | {"ablations": described}))
    return path


@pytest.fixture
def study(tmp_path):
    return load(write_ablation(tmp_path))


def test_variants_are_series_of_their_own_and_never_averaged_with_the_base(study):
    assert study.series == ("sc", "sc edge_hidden=4", "sc rank=1", "sc rank=8", "sc window=4")
    assert set(study.runs["base"]) == {"sc"}
    assert study.of("sc rank=8")["val_nll"].tolist() == pytest.approx([2.45, 2.46, 2.47])


def test_many_values_are_in_the_order_of_their_numbers(tmp_path):
    settings = [{"variant": f"window={value}"} for value in (12, 8, 4)]
    assert load(write_study(tmp_path, mechanisms=["sc"], lrs=[1e-3], seeds=1, settings=settings)).series == (
        "sc window=4",
        "sc window=8",
        "sc window=12",
    )


def test_the_table_has_the_papers_columns_and_the_base_stands_under_each_setting(study):
    (table,) = ablation.ablation_tables(study)
    assert table.header == ("", "4", "256", "1", "4", "8", "2", "4")
    assert table.groups == (("", 1), ("Edge hidden dimension (ξ)", 2), ("Rank (r)", 3), ("Window size (w)", 2))
    name, *cells = table.rows[0]
    assert name.text == "Validation NLL" and [cell.text for cell in cells] == [
        "2.710",
        "2.510",
        "2.610",
        "2.510",
        "2.460",
        "2.510",
        "2.810",
    ]
    assert cells[1] == cells[5] and cells[1].detail == "2.500–\n2.520\nn=3" and cells[3].text == cells[1].text
    assert [cell.bold for cell in cells] == [False, True, False, False, True, True, False]
    assert [row[0].text for row in table.rows] == ["Validation NLL", "Model size"], (
        "no generative NLL was measured, and one rate needs no row"
    )
    assert [cell.text for cell in table.rows[-1][1:]] == ["1.4 M", "606 k", "1.4 M", "606 k", "1.4 M", "606 k", "606 k"]
    assert table.rows[-1][2].detail == "606,432" and "edge_hidden=256, rank=4 and window=2" in table.caption
    assert max(map(len, table.text().splitlines())) <= 150


def test_with_several_rates_each_column_stands_at_its_own_best_one(tmp_path):
    (table,) = ablation.ablation_tables(load(write_ablation(tmp_path, lrs=(1e-3, 1e-2))))
    rates = next(row for row in table.rows if row[0].text == "at LR")
    assert [cell.text for cell in rates[1:]] == ["1e-3", "1e-3", "1e-3", "1e-3", "1e-2", "1e-3", "1e-3"]
    assert table.rows[0][5].text == "2.410"


def test_generative_nll_is_shown_where_it_was_measured(tmp_path):
    (table,) = ablation.ablation_tables(
        load(write_ablation(tmp_path, gen_nll=lambda label, seed: 5.5 + seed if label == "" else None))
    )
    cells = next(row for row in table.rows if row[0].text == "Generative NLL")
    assert [cell.text for cell in cells[1:]] == ["--", "6.500", "--", "6.500", "--", "6.500", "--"]


def test_a_divergence_is_counted_in_its_cell_and_marked_in_the_figure(tmp_path):
    path = write_ablation(
        tmp_path, nll=lambda label, lr, seed: math.inf if label == "window=4" and seed else nll(label, lr, seed)
    )
    (table,) = ablation.ablation_tables(load(path))
    assert table.rows[0][-1].text == "2.800" and "diverged\n2/3" in table.rows[0][-1].detail
    figure = ablation.figures(load(path))["ablation-0"].figure
    assert "2/3" in {text.get_text() for text in figure.axes[2].texts}


def test_wide_ablations_are_split_between_settings(study, monkeypatch):
    monkeypatch.setattr(ablation, "MOST_COLUMNS", 5)
    assert [len(table.header) - 1 for table in ablation.ablation_tables(study)] == [5, 2]


def test_the_figure_has_a_panel_for_each_setting_with_every_seed_and_a_ring_at_the_base(study):
    with matplotlib.rc_context(RC):
        figure = ablation.figures(study)["ablation-0"].figure
    assert [ax.get_xlabel() for ax in figure.axes] == ["Edge hidden dimension (ξ)", "Rank (r)", "Window size (w)"]
    for ax, (setting, row) in zip(figure.axes, VALUES.items(), strict=True):
        points = [line for line in ax.lines if line.get_marker() == "s"]
        assert [line.get_xdata()[0] for line in points] == list(row) and all(
            len(line.get_ydata()) == 3 for line in points
        )
        (ring,) = [line for line in ax.lines if line.get_marker() == "o"]
        assert ring.get_xdata()[0] == BASE[setting]
        assert [label.get_text() for label in ax.get_xticklabels()] == [str(value) for value in row]
    assert np.allclose(figure.axes[2].lines[0].get_ydata(), [2.51, 2.81])


def test_directions_are_claimed_by_seeds_and_compared_with_the_paper(study):
    falls, also, rises = ablation.directions(study)
    assert (
        "edge_hidden from 4 to 256: the validation NLL changes by -0.200 nats" in falls
        and "it falls; in the paper it falls (Table 9)" in falls
    )
    assert "rank from 1 to 8: the validation NLL changes by -0.150" in also
    assert (
        "window from 2 to 4: the validation NLL changes by +0.300 nats" in rises
        and "it rises; in the paper it falls" in rises
    )
    assert "mean of 3 paired seeds; 95 % interval" in rises


def trends(folder, nll=nll, **how):
    """The claims on Table 9 by setting, for NLLs that scatter a little from seed to seed in each value."""
    noisy = lambda label, lr, seed: nll(label, lr, seed) + 0.01 * ((seed * len(label)) % 5)  # noqa: E731
    judged = claims.judge(load(write_ablation(folder, nll=noisy, **how)))
    return {each.subject.split()[-1]: each for each in judged if each.subject.startswith("Table 9")}


def test_the_trends_of_table_9_are_claims_with_an_interval(tmp_path):
    stats = pytest.importorskip("scipy.stats")
    found = trends(tmp_path, seeds=4)
    assert {name: each.verdict for name, each in found.items()} == {
        "edge_hidden": "holds", "rank": "holds", "window": "contradicted"
    }  # fmt: skip
    rises = found["window"]
    values = [0.3 + 0.01 * ((seed * len("window=4")) % 5) for seed in range(4)]
    assert rises.differences == pytest.approx(values) and rises.p == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert rises.interval == f"95 %: +{low:.3f} to +{high:.3f} nats" and rises.paper == claims.CONSENSUS
    assert rises.statement == "a larger window lowers sc's validation NLL (Table 9)"
    assert "sc's validation NLL changes by +0.320 nats with window from 2 to 4" in rises.text


def test_no_trend_is_judged_of_models_that_learned_little_or_diverged(tmp_path):
    little = trends(tmp_path / "little", lambda label, lr, seed: UNIGRAM - 0.01 + SHIFTS[label] / 10)
    assert {each.verdict for each in little.values()} == {"not judged"} and "less than 5 %" in little["window"].text
    lost = trends(tmp_path / "lost", lambda label, lr, seed: math.inf if label == "window=4" and seed == 0 else 2.5)
    assert lost["window"].verdict == "not judged" and "diverged at window=4" in lost["window"].text
    assert trends(tmp_path / "one", seeds=1)["rank"].verdict == "no claim"


def test_directions_claim_nothing_from_one_seed_disagreeing_seeds_or_untrained_models(tmp_path):
    one = ablation.directions(load(write_ablation(tmp_path / "1", seeds=1)))
    assert all("no direction can be claimed" in text for text in one)
    two = ablation.directions(load(write_ablation(tmp_path / "2", seeds=2)))
    assert "two seeds indicate that it falls" in two[0] and "range -0.200 to -0.200" in two[0]
    apart = ablation.directions(
        load(write_ablation(tmp_path / "3", nll=lambda label, lr, seed: 2.5 + (seed - 1) * (label == "window=4")))
    )
    assert "no direction can be claimed" in apart[2]
    flat = ablation.directions(
        load(write_ablation(tmp_path / "4", nll=lambda label, lr, seed: UNIGRAM + 0.2 + SHIFTS[label]))
    )
    assert all("neither learned more than token frequencies" in text for text in flat)
    little = ablation.directions(
        load(write_ablation(tmp_path / "6", nll=lambda label, lr, seed: UNIGRAM - 0.1 + SHIFTS[label]))
    )
    assert (
        "it falls; in the paper it falls (Table 9). Little was learned: the better of the two lies 0.100 nats below"
        in little[0]
    )
    gone = ablation.directions(
        load(write_ablation(tmp_path / "5", nll=lambda label, lr, seed: math.inf if label == "window=4" else 2.5))
    )
    assert (
        "no seed finished at both; 4 diverged 3/3, which counts as infinitely bad: it rises; in the paper it falls"
        in gone[2]
    )


@pytest.mark.parametrize(
    ("lost", "seeds", "said", "verdict"),
    [
        ({("window=4", 1), ("window=4", 3)}, 4, "4 diverged 2/4", "no direction can be claimed"),
        ({("window=4", 1)}, 2, "4 diverged 1/2", "no direction can be claimed"),
        ({("window=4", seed) for seed in range(3)}, 3, "4 diverged 3/3", "it rises"),
        ({("", seed) for seed in range(3)}, 3, "2 diverged 3/3", "it falls"),
        ({("", 0), ("window=4", 0)}, 4, "2 diverged 1/4 and 4 diverged 1/4", "it falls"),
        ({("", 0), ("window=4", 1)}, 4, "2 diverged 1/4 and 4 diverged 1/4", "no direction can be claimed"),
    ],
)
def test_a_diverged_run_counts_as_infinitely_bad_in_a_direction(tmp_path, lost, seeds, said, verdict):
    """The survivors of window=4 lie 0.1 nats below the base in every seed, give or take 0.01."""

    def nll(label, lr, seed):
        return math.inf if (label, seed) in lost else 2.5 - (0.1 + 0.01 * (seed % 2)) * (label == "window=4")

    text = ablation.directions(load(write_ablation(tmp_path, nll=nll, seeds=seeds)))[2]
    assert said in text and text.endswith(f"{verdict}; in the paper it falls (Table 9).")
    survivors = seeds - len({seed for _, seed in lost})
    assert (
        (f"{survivors} paired seed" in text and "that finished at both" in text)
        if survivors
        else "no seed finished at both" in text
    )


def test_where_every_seed_diverged_at_both_nothing_tells_them_apart(tmp_path):
    study = load(write_ablation(tmp_path, nll=lambda label, lr, seed: math.inf if label in ("", "window=4") else 2.5))
    assert ablation.directions(study)[2].endswith(
        "no seed has a result that tells the two apart (2 diverged 3/3 and 4 diverged 3/3)."
    )


def test_the_generative_cell_says_how_many_of_its_runs_diverged(tmp_path):
    def nll(label, lr, seed):
        return math.inf if label == "" and seed == 0 else 2.5

    study = load(write_ablation(tmp_path, nll=nll, gen_nll=lambda label, seed: 5.5 if label == "" and seed else None))
    (table,) = ablation.ablation_tables(study)
    cell = next(row for row in table.rows if row[0].text == "Generative NLL")[2]
    assert cell.text == "5.500" and cell.detail.endswith("n=2\ndiverged\n1/3")


def test_summary_and_pdf_hold_the_table_once_and_the_general_ones_only_where_they_say_more(tmp_path, drawn):
    drawn("ablation")
    path = write_ablation(tmp_path / "one")
    text = summary(path)
    assert (
        text.count("Ablation of sc") == 1
        and "Validation NLL against learning rate" not in text
        and "Stable windows" not in text
    )
    pdf = text_of(build(path, tmp_path / "pdf"))
    assert "Ablation of sc" in pdf and "Edge hidden dimension" in pdf and "it rises; in the paper it falls" in pdf
    more = summary(write_ablation(tmp_path / "more", mechanisms=("sa", "sc")))
    assert "Ablation of sc" in more and "Validation NLL against learning rate" in more and "Ablation of sa" not in more


@pytest.mark.parametrize("lost", ["", "rank=8"])
def test_values_whose_runs_were_lost_are_left_out(tmp_path, lost):
    path = write_ablation(tmp_path)
    table = path / "results" / "runs.parquet"
    write_table(table, "runs", [row for row in pq.read_table(table).to_pylist() if row["variant"] != lost])
    study = load(path)
    (shown,) = ablation.ablation_tables(study)
    assert shown.header == (("", "4", "1", "8", "4") if lost == "" else ("", "4", "256", "1", "4", "2", "4"))
    assert ablation.SECTION.applies(study) and len(ablation.directions(study)) == (1 if lost == "" else 3)
    assert "Ablation of sc" in summary(path)
    build(path, tmp_path / "pdf")


def test_the_papers_claims_are_judged_on_the_base_alone(tmp_path):
    texts = [
        claim.text
        for claim in claims.judge(load(write_ablation(tmp_path, mechanisms=("sa", "sc"), lrs=(1e-3, 1e-2, 1e-1))))
        if claim.paper
    ]
    assert not any(re.search(r"\w=\w", text.replace("lr=edge", "")) for text in texts) and len(texts) == len(set(texts))


def test_studies_without_ablations_have_no_such_section(quickstart, quickstart_dir):
    assert ablations(quickstart) == () and ablation.figures(quickstart) == {}
    assert "Ablation of" not in summary(quickstart_dir)


def test_results_from_before_the_column_name_the_command_that_writes_them_again(tmp_path):
    path = write_study(tmp_path, name="old", lrs=[1e-3], seeds=1)
    table = path / "results" / "runs.parquet"
    pq.write_table(pq.read_table(table).drop_columns(["variant"]), table)
    with pytest.raises(
        ValueError, match=r"lacks the column variant: `python -m stability\.sweep name=old` writes it again"
    ):
        load(path)


def test_a_variant_of_another_optimizer_or_of_a_field_is_named_by_its_label_and_stands_beside_the_base(tmp_path):
    """The runs of `ablate.optimizer=[sgd] ablate.clip_norm=[null]`."""
    rates = {"adamw": 1e-3, "lion": 1e-3, "sgd": 0.1}
    varied = [("", "adamw"), ("optimizer=sgd", "sgd"), ("optimizer=lion", "lion"), ("clip_norm=null", "adamw")]
    settings = [{"variant": variant, "optimizer": optimizer} for variant, optimizer in varied]
    path = write_study(tmp_path, mechanisms=["sa", "sw"], lrs=[1e-3, 1e-2], seeds=3, settings=settings)
    told = json.loads((path / "study.json").read_text())
    values = {"optimizer": {"adamw": "", "sgd": "sgd", "lion": "lion"}, "clip_norm": {1.0: "", None: "null"}}
    ablated = [
        {
            "axis": name,
            "part": name,
            "setting": "",
            "values": [{"value": value, "variant": text and f"{name}={text}"} for value, text in row.items()],
        }
        for name, row in values.items()
    ]
    (path / "study.json").write_text(json.dumps(told | {"ablations": ablated, "lr_references": rates}))
    study = load(path)
    assert set(study.series) == {
        f"{name}{variant}"
        for name in ("sa", "sw")
        for variant in ("", " optimizer=sgd", " optimizer=lion", " clip_norm=null")
    }
    assert set(study.runs["base"]) == {"sa", "sw"}
    assert set(study.of("sa optimizer=sgd")["optimizer"]) == {"sgd"}, "the table of runs keeps what was trained"
    tables = ablation.ablation_tables(study)
    assert [table.groups for table in tables] == [(("", 1), ("optimizer", 3), ("clip_norm", 2))] * 2
    assert [table.header for table in tables] == [("", "adamw", "sgd", "lion", "1", "null")] * 2
    assert references(study) == {
        "sa optimizer=lion": "sa",  # one reference rate; sgd's rates are of another size
        "sa clip_norm=null": "sa",
        "sw": "sa",
        "sw optimizer=sgd": "sa optimizer=sgd",
        "sw optimizer=lion": "sa optimizer=lion",
        "sw clip_norm=null": "sa clip_norm=null",
    }, "only what is named differs"


@pytest.mark.parametrize("base", ["glu", "mlp"])
def test_a_variant_of_another_feed_forward_network_is_named_by_its_label_alone(tmp_path, base):
    """The runs of `ffn=glu ablate.ffn=[moe]`, or of the usual mlp, whose model names it not."""
    models = {"": "nano linear=bitnet" if base == "mlp" else f"nano ffn={base} linear=bitnet"}
    models["ffn=moe"] = "nano ffn=moe linear=bitnet"
    settings = [{"variant": variant, "model": model} for variant, model in models.items()]
    path = write_study(tmp_path, mechanisms=["sa"], lrs=[1e-3, 1e-2], seeds=3, settings=settings)
    values = [{"value": base, "variant": ""}, {"value": "moe", "variant": "ffn=moe"}]
    told = json.loads((path / "study.json").read_text())
    ablated = [{"axis": "ffn", "part": "ffn", "setting": "", "values": values}]
    (path / "study.json").write_text(json.dumps(told | {"ablations": ablated}))
    study = load(path)
    assert list(study.series) == ["sa", "sa ffn=moe"] and set(study.runs["base"]) == {"sa"}
    assert set(study.of("sa ffn=moe")["model"]) == {models["ffn=moe"]}, "the table of runs keeps what was trained"


def test_a_report_of_several_studies_has_settings_one_at_a_time_only_where_there_is_one_rate(tmp_path):
    for name, lrs in (("one", (1e-3,)), ("two", (1e-3, 1e-2))):
        pieces = [
            each
            for part in assembly.pieces(load(write_ablation(tmp_path / name, lrs=lrs)), "0-", "short")
            for each in part
        ]
        assert ("One setting at a time" in [getattr(each, "text", "") for each in pieces]) == (name == "one")


def test_variants_are_ranked_by_how_far_their_rate_can_be_pushed_before_they_leave_the_bases_best_nll(
    tmp_path, monkeypatch
):
    """window=4 learns best at no rate, but reaches furthest; rank=8 is better at one rate alone."""
    limits = {"window=4": 5e-1, "rank=1": 5e-2}
    best = {"rank=8": 2.3, "window=4": 2.55}

    def nll(label, lr, seed):
        return (best.get(label, 2.5) if lr < limits.get(label, 5e-3) else 3.0) + 0.001 * seed

    study = load(write_ablation(tmp_path, lrs=(1e-4, 1e-3, 1e-2, 1e-1, 1.0), nll=nll))
    ranked = rank_variants(study)
    assert ranked[:2] == ["sc window=4", "sc rank=1"] and set(ranked) == set(study.series)
    assert best_series(study) == list(study.series), "few are all shown in the study's order"
    monkeypatch.setattr(headline, "MOST_ROWS", 2)
    monkeypatch.setattr(headline, "RANKED_ROWS", 3)
    assert best_series(study) == ["sc window=4", "sc rank=1", "sc"], "of many the first, and the base"
    assert [row[0].text for row in answer_table(study).rows] == best_series(study)
    beside = load(write_ablation(tmp_path / "sa", mechanisms=("sa", "sc"), lrs=(1e-4, 1e-3, 1e-2, 1e-1, 1.0), nll=nll))
    assert beside.reference == "sa" and {"sa", "sc"} <= {*best_series(beside)}, "the title names the reference"
    first = sentences(study)[0]
    assert first.startswith("Within 5 % of sc's best NLL up to window=4 1.5e-1, rank=1 1.8e-2, rank=8 2.9e-3, sc")
    assert title(study).endswith("? sc to 1e-3–1e-2, with window=4 to 1e-1–1e0")
    assert rank_variants(load(write_ablation(tmp_path / "one"))) == [], "one rate has no window"
    plain = load(write_study(tmp_path / "plain", mechanisms=["sa", "sw"], lrs=[1e-3, 1e-2], seeds=2))
    assert rank_variants(plain) == []


def test_losses_of_different_units_share_no_axis(tmp_path):
    folder = write_ablation(tmp_path, lrs=(1e-3, 1e-2))
    plain = load(folder)
    manifest = json.loads((folder / "study.json").read_text())
    losses = [{"value": label, "variant": label} for label in LABELS]
    ablation_of_losses = [{"axis": "objective", "part": "objective", "setting": "loss", "values": losses}]
    (folder / "study.json").write_text(json.dumps(manifest | {"ablations": ablation_of_losses}))
    study = load(folder)
    with matplotlib.rc_context(RC):
        pairs = [(nll_figures.nll_figure(each), nll_figures.window_figure(each)) for each in (plain, study)]
        drawn = [curves.figures(each) for each in (plain, study)]
    assert [[len(figure.axes) for figure in pair] for pair in pairs] == [[2, 2], [len(LABELS) + 1, 1]]
    for ax, name in zip(pairs[1][0].axes, study.series, strict=False):
        low, high = ax.get_ylim()
        values = study.of(name)["val_nll"]
        assert low < values.min() and high < values.max() + 1, f"{name}'s axis is another's"
    assert [curves.BY_RATE in each for each in drawn] == [True, False]
    unfinished = load(folder)
    unfinished.runs.loc[unfinished.runs["series"] != "sc", "val_nll"] = math.nan
    figure = nll_figures.nll_figure(unfinished)
    assert figure is not None and len(figure.axes) == 2
