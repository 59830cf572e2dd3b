"""What stands in the tables' cells, and both renderings."""

import math
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from analysis.drawing import tables
from analysis.drawing.pieces import Paragraph, Picture
from analysis.drawing.typeset import Cell, Table, literal
from analysis.export import export
from analysis.measures import spread_cell
from analysis.numbers.spread import Spread
from analysis.numbers.windows import window
from analysis.sections import nll, overview
from analysis.sections.alpha_tables import alpha_tables
from analysis.study import wording as recipe
from analysis.study.load import load
from analysis.words import significant
from tests.analysis.synthetic import FINGERPRINT, words_of, write_study

LRS = (1e-3, 1e-2)


def table_of(tmp_path, make, **settings):
    result = make(load(write_study(tmp_path, **({"lrs": LRS, "mechanisms": ("sa", "sc")} | settings))))
    return result[0] if isinstance(result, list) else result


def nlls(*values):
    return lambda _m, _lr, seed: values[seed]


def test_nll_cells_carry_median_range_and_n(tmp_path):
    two = table_of(tmp_path / "2", nll.nll_tables, nll=nlls(2.0, 3.0))
    assert two.rows[0][1] == Cell("2.500", "2.000–3.000, n=2", bold=True)
    one = table_of(tmp_path / "1", nll.nll_tables, nll=nlls(2.0), seeds=1)
    assert one.rows[0][1].detail == "n=1"
    three = table_of(tmp_path / "3", nll.nll_tables, nll=nlls(1.0, 2.0, 3.0), seeds=3)
    assert three.rows[0][1].text == "2.000" and three.rows[0][1].detail == "1.000–3.000, n=3"


def test_nll_cells_count_the_runs_that_ended_badly(tmp_path):
    statuses = {
        ("sa", 1e-3, 0): ("failed", "x"),
        ("sc", 1e-3, 0): ("queued", ""),
        ("sc", 1e-3, 1): ("running", ""),
        ("sc", 1e-2, 0): ("plateaued", ""),
    }
    val_nll = lambda m, lr, seed: math.inf if (m, lr) == ("sa", 1e-2) else 2.0  # noqa: E731
    (low_lr, sa_low, sc_low), (_, sa_high, sc_high) = table_of(
        tmp_path, nll.nll_tables, nll=val_nll, statuses=statuses
    ).rows
    assert low_lr.text == "1e-3" and sa_low.detail == "n=1\nfailed 1/2"
    assert (sc_low.text, sc_low.detail) == ("queued 1/2", "running 1/2")
    assert sa_high == Cell("diverged 2/2") and sc_high.detail == "2.000–2.000, n=2\nlearned nothing 1/2"


def test_a_finished_run_without_a_finite_nll_is_called_so(tmp_path):
    statuses = {("sa", 1e-3, seed): ("stable", "") for seed in (0, 1)}
    assert (
        table_of(tmp_path, nll.nll_tables, nll=nlls(math.inf, math.inf), statuses=statuses).rows[0][1].text
        == "non-finite 2/2"
    )


def test_a_rate_that_a_mechanism_was_not_run_at_is_a_dash(tmp_path):
    study = load(write_study(tmp_path, lrs=LRS, mechanisms=("sa", "sc")))
    study = replace(study, runs=study.runs[(study.runs["mechanism"] != "sc") | (study.runs["lr"] != 1e-2)])
    assert nll.nll_tables(study)[0].rows[1][2] == Cell("--")


def test_only_the_best_rate_of_a_column_is_bold(quickstart):
    table = nll.nll_tables(quickstart)[0]
    assert [sum(row[column].bold for row in table.rows) for column in range(1, 5)] == [1, 1, 1, 1]


def test_a_long_name_may_break_in_a_heading_and_in_a_cell_but_no_number_does():
    names = ("", "sa", "sparse_transformer", "objective.loss=cosine", "mhc_lite", "4.6e-4–1.25e-3")
    source = Table("Title", "Caption.", names, ((*map(Cell, names),),)).typst()
    assert source.count("sparse_\u200btransformer") == source.count("objective.\u200bloss=\u200bcosine") == 2
    assert source.count("mhc_lite") == source.count("4.6e-4–1.25e-3") == 2
    assert "sa sparse_\u200btransformer" in Table("T", "C", ("a",), ((Cell("x", "sa sparse_transformer"),),)).typst()


def test_a_document_has_minus_signs_subscripts_and_no_break_between_a_number_and_its_percent():
    assert literal("by -0.27 decades (-0.38 to 1e-3)") == '"by −0.27 decades (−0.38 to 1e-3)"'
    assert literal("on 2026-11-28: python -m x lr=[-1,2] y=-3") == '"on 2026-11-28: python -m x lr=[-1,2] y=-3"'
    assert literal("95 % of (≥ 1.08)") == '"95\u00a0% of (≥\u00a01.08)"'
    cell = Table("T", "C", ("a",), ((Cell("2ηλ_max = 5", "λ_1"),),)).typst()
    assert "λ#sub[max]" in cell and "λ#sub[1]" in cell


def test_a_figure_is_as_wide_as_it_was_drawn():
    narrow, wide = (Picture("a", Figure(figsize=(width, 2)), "C", "a.pdf").typst() for width in (3.265, 9.0))
    assert "width: 50.0% * shrink" in narrow and "width: 100.0% * shrink" in wide


@pytest.mark.parametrize(
    ("value", "text"),
    [(376.2, "380"), (0.2149, "0.21"), (5.0, "5"), (706712.0, "7.1e5"), (-0.031, "-0.031"), (0.0, "0")],
)
def test_a_number_of_two_digits_has_no_exponent_below_ten_thousand(value, text):
    assert significant(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(9949.0, "9900"), (9951.0, "1.0e4"), (0.0099, "9.9e-3"), (0.00999, "0.01"), (math.nan, "--"), (math.inf, "∞")],
)
def test_a_number_is_plain_from_a_hundredth_to_9999(value, text):
    assert significant(value) == text


def test_a_median_over_seeds_is_a_plain_number():
    assert spread_cell(Spread.of([5.4, 5.3, 5.5])) == Cell("5.4", "5.3–5.5, n=3")


def test_wide_studies_are_split_evenly():
    assert [len(part) for part in tables.chunks([str(i) for i in range(7)], 6)] == [4, 3]
    assert tables.chunks(["a", "b"], 6) == [("a", "b")]


SPEC = {
    "objective": {"name": "score_entropy", "graph": "absorbing", "noise": "loglinear"},
    "data": {"name": "text", "tokenizer": "gpt2", "keep": 4096},
    "model": {"name": "nano", "layers": 4, "width": 64, "heads": 2, "positions": 128},
    "steps": 900,
    "batch": 8,
    "microbatch": None,
}


@pytest.mark.parametrize(
    ("description", "origin"),
    [
        (
            "text of mixed (3 files; left out: a: b.md, c.json): 128 documents, 2 null texts left out",
            "text of mixed (3 files)",
        ),
        ("images of pics (left out: notes.txt): 118 training images", "images of pics"),
        ("DNA of g.fa: 31 records, 2 empty left out; stretches shorter than 4 left out: 1, 5 % of it", "DNA of g.fa"),
    ],
)
def test_captions_name_the_data_without_the_files_that_were_left_out(quickstart, description, origin):
    known = quickstart.study | {"provenance": {"data_description": description}}
    assert f" ({origin}). Objective" in tables.source(replace(quickstart, study=known))


def test_captions_name_objective_tokens_and_unit_and_the_overview_size_and_steps(quickstart):
    assert "Nats per predicted token at the end" in nll.nll_tables(quickstart)[0].caption
    assert tables.source(quickstart).endswith("Objective: mlm.")
    words = words_of(
        "score_entropy", summary="score_entropy, absorbing graph, loglinear noise", tokens="gpt2, 4,096 kept"
    )
    bounded = replace(
        quickstart,
        runs=quickstart.runs.assign(objective="score_entropy"),
        study=quickstart.study | {"spec": SPEC, "words": words},
    )
    (table,) = nll.nll_tables(bounded)
    assert table.caption.startswith("Upper bound, nats per token at the end of training")
    told = tables.source(bounded)
    assert told.endswith("; gpt2, 4,096 kept). Objective: score_entropy, absorbing graph, loglinear noise.")
    facts = dict(recipe.facts(bounded))
    assert (
        facts["Model"].startswith("nano: 4 layers, width 64, 2 heads, 128 positions; ")
        and facts["Training"] == "900 steps of 8 sequences"
    )


def test_every_written_table_carries_the_fingerprint_that_a_report_has_once(quickstart, tmp_path):
    captions = [nll.window_table(quickstart).caption, overview.trouble_table(quickstart).caption]
    assert not any(FINGERPRINT[:12] in caption for caption in captions)
    written = [path for path in export(quickstart, tmp_path, has_long_captions=True) if path.suffix in (".md", ".tex")]
    assert len(written) > 10 and all(FINGERPRINT[:12] in path.read_text("utf-8") for path in written)


@pytest.mark.parametrize(
    ("nlls", "width", "words"),
    [
        ([2.2, 2.0, 2.2], "1.00", "low 1e-3–1e-2\nhigh 1e-2–1e-1"),
        ([2.2, 2.0, 2.05], "≥ 1.50", "low 1e-3–1e-2\nhigh open"),
        ([2.0, 2.0, 2.0], "≥ 2.00", "low open\nhigh open"),
        ([2.2, 2.0, math.inf], "0.50–1.50", "low 1e-3–1e-2\nhigh 1e-2–1e-1 diverged"),
        ([math.nan, 2.0, math.inf], "≥ 0.00", "low no result\nhigh 1e-2–1e-1 diverged"),
    ],
)
def test_widths_and_edges_in_words(nlls, width, words):
    found = window([1e-3, 1e-2, 1e-1], nlls)
    assert (tables.width_text(found), nll.edge_words(found)) == (width, words)


def test_window_rows(tmp_path):
    table = table_of(
        tmp_path, nll.window_table, nll=lambda m, lr, _: math.inf if m == "sc" else {1e-3: 2.2, 1e-2: 2.0}[lr]
    )
    sa, sc = table.rows
    assert [cell.text for cell in sa] == ["sa", "1e-2", "2.000", "≥ 0.50", "≥ 0.50", "≥ 0.50", "slow / end of the grid"]
    assert sa[0].detail == "248 k parameters\nfrequencies 3.200" and sa[2].detail == "2.000–2.000, n=2"
    assert sa[3].detail == "3.2e-3 to 1.0e-2\nlow 1e-3–1e-2\nhigh open\n0.50 to 0.50, n=2"
    assert [cell.text for cell in sc[1:]] == ["--", "every run diverged", "--", "--", "--", "--"]


def alpha_row(tmp_path, alpha, lr=1e-3, **settings):
    found = table_of(tmp_path, alpha_tables, lrs=(lr,), alpha=alpha, states=["paper"], **settings)
    return found.rows[0], found


def test_alpha_cells_take_finite_medians_and_count_infinity_as_stable(tmp_path):
    values = {"sa": [0.0, 1e-4, 3e-4, math.inf, math.nan], "sc": [2e-3, 4e-3, math.inf, math.inf, 1e-4]}
    (_, sa, sc, sa_share, sc_share), table = alpha_row(tmp_path, lambda m, *_: values[m])
    # sa: finite 0, 1e-4, 3e-4; stable only the infinite one. sc: finite 1e-4, 2e-3, 4e-3; stable 4 of 5.
    assert (sa.text, sa.bold, sc.text, sc.bold) == ("1.0e-4", False, "2.0e-3", True)
    assert (sa_share.text, sa_share.bold, sc_share.text, sc_share.bold) == ("20", False, "80", True)
    assert sa.detail == "1.0e-4–1.0e-4, n=2" and sc_share.detail == "80–80, n=10"
    assert "2 of 20 lost to a non-finite loss" in table.caption and "5 steps recorded per run" in table.caption
    assert table.groups == (("", 1), ("median α_max", 2), ("% stable", 2))


def test_alpha_dashes(tmp_path):
    alpha = lambda m, *_: [math.inf, math.inf] if m == "sa" else []  # noqa: E731
    (_, sa, sa_share), table = alpha_row(tmp_path, alpha)
    assert table.header == ("LR", "sa", "sa") and (sa.text, sa_share.text) == ("--", "100")
    alpha = lambda m, lr, *_: [1.0] if m == "sa" or lr == 1e-3 else []  # noqa: E731
    row = table_of(tmp_path / "x", alpha_tables, alpha=alpha, states=["paper"]).rows[1]
    assert (row[2], row[4]) == (Cell("--", "not measured 2/2"), Cell("--", "not measured 2/2"))


def test_a_rate_at_which_nothing_was_measured_has_no_row(tmp_path):
    alpha = lambda _m, lr, *_: [1.0] if lr == 1e-3 else []  # noqa: E731
    table = table_of(tmp_path, alpha_tables, alpha=alpha, states=["paper"])
    assert [row[0].text for row in table.rows] == ["1e-3"] and "Not measured at 1 further rate." in table.caption


def test_ties_are_all_bold_and_zero_is_never(tmp_path):
    (_, _, _, a, b), _ = alpha_row(tmp_path / "tie", lambda *_: [1.0])
    assert a.bold and b.bold
    (_, _, _, a, b), _ = alpha_row(tmp_path / "zero", lambda *_: [0.0])
    assert a.text == "0" and not a.bold and not b.bold


def test_alpha_equal_to_the_rate_is_not_stable(tmp_path):
    (_, sa, _, share, _), _ = alpha_row(tmp_path, lambda *_: [1e-3])
    assert share.text == "0" and not sa.bold


def test_a_median_just_above_the_rate_is_bold(tmp_path):
    (_, sa, *_), _ = alpha_row(tmp_path, lambda *_: [1.01e-3])
    assert sa == Cell("1.0e-3", "1.0e-3–1.0e-3, n=2", bold=True)


def test_the_spread_is_over_runs(tmp_path):
    (_, sa, _, share, _), _ = alpha_row(tmp_path, lambda _m, _lr, seed, _s: [1e-4, 1e-4] if seed else [1e-2, 2e-4])
    assert sa.detail == "1.0e-4–5.1e-3, n=2" and share.detail == "0–50, n=4" and share.text == "25"


def test_a_single_run_has_n_and_no_interval(tmp_path):
    (_, sa, _, share, _), _ = alpha_row(tmp_path, lambda *_: [1.0], seeds=1)
    assert sa.detail == "n=1" and share.detail == "n=1"


def test_one_table_per_phase_state_and_four_series(tmp_path):
    study = load(
        write_study(
            tmp_path, lrs=(1e-3,), mechanisms=list("abcdef"), alpha=lambda *_: [1.0], phases=("earliest", "terminal")
        )
    )
    found = alpha_tables(study)
    assert len(found) == 8 and [table.title.partition("steps,")[2] for table in found[::2]] == [
        " paper's warm-up state, terminal checkpoint", " run's own state, terminal checkpoint", " paper's warm-up state, earliest checkpoint", " run's own state, earliest checkpoint"
    ]  # fmt: skip
    assert len(alpha_tables(study, phases=("terminal",), states=("paper",))) == 2


def test_no_curvature_no_alpha_table(tmp_path):
    assert alpha_tables(load(write_study(tmp_path, lrs=LRS))) == []


def test_trouble_table_lists_what_is_not_stable_with_its_reason(tmp_path):
    statuses = {("sc", 1e-3, 0): ("failed", "see runs/x/traceback.txt"), ("sa", 1e-2, 1): ("spiked", "")}
    table = table_of(tmp_path, overview.trouble_table, nll=lambda *_: 2.0, statuses=statuses)
    assert [[cell.text for cell in row[1:]] for row in table.rows] == [
        ["sa", "1e-2", "1", "spiked", "200", "--"],
        ["sc", "1e-3", "0", "failed", "11", "see runs/x/traceback.txt"],
    ]


def test_no_trouble_no_table_and_much_trouble_is_cut(tmp_path):
    assert overview.trouble_table(load(write_study(tmp_path / "good", lrs=LRS, nll=lambda *_: 2.0))) is None
    table = table_of(tmp_path / "bad", overview.trouble_table, nll=lambda *_: math.inf, seeds=20)
    assert len(table.rows) == overview.TROUBLES_SHOWN and "20 further runs not shown" in table.caption


def test_logs_that_end_before_their_runs_are_named_and_those_of_unfinished_runs_are_not(tmp_path):
    study = load(write_study(tmp_path, lrs=LRS, statuses={("sc", 1e-3, 0): ("running", "")}))
    assert overview.cut_short(study) == "" and not overview.TROUBLES.tables(study, ())
    one, other, unfinished = (
        study.runs.query("mechanism == @m and lr == 1e-3 and seed == @seed")["run_id"].item()
        for m, seed in (("sa", 0), ("sa", 1), ("sc", 0))
    )
    curves = study.curves
    kept = curves[
        ~curves["run_id"].isin([one, other, unfinished]) | ((curves["run_id"] == one) & (curves["step"] < 150))
    ]
    [told] = overview.TROUBLES.tables(short := replace(study, curves=kept), ())
    assert told.startswith(f"The log (metrics.jsonl) of 2 finished runs ends early, that of {one} at step 149 of 200:")
    assert any(told in piece.text for piece in overview.TROUBLES.body(short, {}) if isinstance(piece, Paragraph))


SMALL = Table(
    "Title",
    "Bold: best.",
    ("LR", "sa"),
    ((Cell("1e-3"), Cell("2.0", "n=1\nfailed 1/2", True)),),
    (("", 1), ("a wide group", 1)),
    brief="Short.",
)


def test_plain_text_is_aligned_and_marks_bold():
    assert SMALL.text().splitlines() == [
        "Title",
        "------------------",
        "      a wide group",
        "LR              sa",
        "------------------",
        "1e-3          2.0*",
        "               n=1",
        "        failed 1/2",
        "------------------",
        "Bold: best. * stands for bold.",
    ]
    assert SMALL.text(details=False).splitlines()[-1] == "Short. * stands for bold." and "n=1" not in SMALL.text(
        details=False
    )


def test_typst_keeps_short_tables_whole_and_breaks_long_ones():
    long = Table("T", "C", ("a",), ((Cell("x"),),) * 40)
    assert "breakable: false" in SMALL.typst() and "breakable: true" in long.typst()
    of_lines = Table("T", "C", ("a",), ((Cell("x", detail="95 %: 1 to 2\nneeds 9 seeds"),),) * 6)
    assert "breakable: true" in of_lines.typst(), "six rows of three lines"
    assert (
        '#strong[#"2.0"]' in SMALL.typst()
        and '#detail[#"failed 1/2"]' in SMALL.typst()
        and "colspan: 1" in SMALL.typst()
    )


def test_ragged_rows_are_our_own_bug():
    with pytest.raises(AssertionError):
        Table("T", "C", ("a", "b"), ((Cell("x"),),))
    with pytest.raises(AssertionError):
        Table("T", "C", ("a", "b"), (), (("g", 1),))


def test_cells_of_runs_that_learned_nothing_are_grey_and_never_bold(tmp_path):
    """At 1e-1 two of three runs end above the token-frequency NLL; at 1e-2 one of three."""
    nll = lambda m, lr, seed: 3.3 if seed < {1e-3: 0, 1e-2: 1, 1e-1: 2}[lr] else 2.0  # noqa: E731
    lrs = (1e-3, 1e-2, 1e-1)
    study = load(
        write_study(tmp_path, mechanisms=("sa",), lrs=lrs, seeds=3, nll=nll, alpha=lambda *_: [1.0], states=["paper"])
    )
    (table,) = alpha_tables(study)
    assert [[cell.pale for cell in row[1:]] for row in table.rows] == [[False] * 2, [False] * 2, [True] * 2]
    assert not any(cell.bold for cell in table.rows[2]) and table.rows[0][1].bold
    text = table.text(details=False)
    assert "not that training succeeds" in table.caption and "(1.0e0)" in text and "(100)" in text
    assert '#text(fill: muted)[#"1.0e0"]' in table.typst()
