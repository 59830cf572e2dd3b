"""The first two pages, on studies with known answers."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pandas as pd
import pypdf
import pytest

from analysis import assembly
from analysis.assembly import ELSEWHERE
from analysis.claims import signals
from analysis.claims.claim import CONSENSUS, Claim
from analysis.claims.judging import judge
from analysis.claims.reference import BEYOND
from analysis.drawing.pieces import Boxed, Heading, PageBreak, Picture
from analysis.drawing.typeset import Table
from analysis.export import export_together
from analysis.numbers.common_windows import rank_variants
from analysis.numbers.first_failure import first_failure
from analysis.numbers.learning import unlearned_words
from analysis.numbers.windows import windows
from analysis.report import build_together, summary
from analysis.sections import alpha, front, nll_figures
from analysis.sections.front import describe_runs
from analysis.sections.headline import (
    MOST_LINES,
    answer,
    answer_table,
    best_series,
    comparison_table,
    lists_reference,
    lowest_nll,
    title,
)
from analysis.sections.nll_figures import nll_figure, window_figure
from analysis.sections.overview import TROUBLED, provenance_line, trouble_table
from analysis.sections.sentences import _say_signals, _say_supported, _say_undecided, is_in_a_table, sentences
from analysis.study.load import load
from stability.registry import Registry
from stability.runs.words import LEARNED_NOTHING
from tests.analysis.synthetic import FINGERPRINT, UNIGRAM, quickstart_alpha, write_study, write_table

RATES = (1e-3, 1e-2, 1e-1, 1.0)


def study_of(tmp_path, nlls, *, seeds=3, rates=RATES, **more):
    """A study whose mechanisms have a given NLL at each rate, the same for every seed."""
    folder = write_study(
        tmp_path,
        mechanisms=list(nlls),
        lrs=rates,
        seeds=seeds,
        nll=lambda name, lr, _: nlls[name][rates.index(lr)],
        **more,
    )
    return load(folder)


@pytest.mark.parametrize(
    ("nlls", "answer"),
    [
        # 5 % of 2.0 are lost a quarter of the decade beyond 1e-2; sc is flat but never as good
        ({"sa": (2.2, 2.0, 2.4, 3.1), "sc": (2.6, 2.5, 2.5, 2.55)}, "within 5 % of sa’s best NLL? sa to between 1e-2 and 1e-1; sc at no swept rate"),
        ({"sa": (2.2, 2.0, 2.4, 3.1), "sc": (2.2, 2.05, 2.05, 2.05)},
         "within 5 % of sa’s best NLL? sa to between 1e-2 and 1e-1 and sc to at least 1e0"),
        # the reference learned nothing, so that each has its own window alone
        ({"sa": (3.3, 3.25, 3.3, 3.3), "sc": (2.2, 2.0, 2.4, 3.1)}, "within 5 % of the best NLL? sc to between 1e-2 and 1e-1"),
        ({"sa": (3.3, 3.25, 3.3, 3.3)}, "? No mechanism learned anything at the rates swept"),
        ({"sa": (math.inf,) * 4}, "? No mechanism learned anything at the rates swept"),
        ({"mine": (2.2, 2.0, 2.4, 3.1)}, "within 5 % of the best NLL? mine to between 1e-2 and 1e-1"),
    ],
)  # fmt: skip
def test_the_title_answers_how_far_the_rate_can_be_pushed(tmp_path, nlls, answer):
    expected = f"How far can the learning rate be pushed {answer}".replace(" ? ", "? ")
    assert title(study_of(tmp_path, nlls)) == expected.replace("pushed ?", "pushed?")


def test_the_title_groups_mechanisms_by_the_rates_between_which_their_edge_lies(tmp_path):
    nlls = {f"m{place}": (2.0, 2.05, 2.05 + 0.1 * (place < 5), 3.1) for place in range(7)}
    said = title(study_of(tmp_path, nlls))
    limit = "How far can the learning rate be pushed within 5 % of m0’s best NLL?"
    assert said == f"{limit} 5 mechanisms to between 1e-2 and 1e-1 and m5 and m6 to between 1e-1 and 1e0"


def test_differences_between_mechanisms_are_named_or_said_to_be_none(tmp_path):
    nlls = {"sa": (2.2, 2.0, 2.4, 3.1), "sc": (2.2, 2.0, 2.4, 3.1)}
    first, second = sentences(study_of(tmp_path / "same", nlls))[:2]
    assert first.startswith("No difference between the mechanisms is established") and "Nearest to it: " in first
    assert re.match(r"Undecided: \d+ of \d+ comparisons \(appendix\)", second)
    nlls["sc"] = (1.5, 1.2, 1.3, 1.3)
    apart = sentences(study_of(tmp_path / "apart", nlls))[0]
    assert apart.startswith("Established (n = 3): ") and "sc" in apart


def test_runs_above_the_references_window_are_compared_a_diverged_one_as_untrained(tmp_path):
    nlls = {"sa": (2.2, 2.0, 2.4, math.inf), "sc": (2.2, 2.0, 2.2, 2.6)}
    (claim,) = [each for each in judge(study_of(tmp_path, nlls)) if each.about == (BEYOND, "sc")]
    # sa's window ends at 10^-1.75; above it lie 1e-1 and 1: (2.2 + 2.6) / 2 less (2.4 + 5.6) / 2
    assert claim.difference == "−1.600 nats" and claim.verdict == "holds" and claim.n == 3
    assert claim.finding == "above sa's window (1e-1 to 1e0) sc's NLL is 1.600 nats lower than sa's"


def test_the_first_page_says_who_learns_most_where_the_rate_is_too_large_for_the_reference(tmp_path):
    """Seeds of sc spread too far to tell; those of gla agree, but learn less than sa."""
    nlls = {"sa": (2.2, 2.0, 2.4, 3.0), "sc": (2.2, 2.0, 2.2, 2.6), "gla": (2.2, 2.0, 2.5, 3.1)}
    spread = {"sc": (0.3, -0.3, 0.0), "gla": (0.0, 0.001, 0.002)}

    def nll(name, lr, seed):
        place = RATES.index(lr)
        return nlls[name][place] + (spread.get(name, (0.0,) * 3)[seed] if place > 1 else 0.0)

    folder = write_study(tmp_path / "apart", mechanisms=list(nlls), lrs=RATES, seeds=3, nll=nll)
    (said,) = [text for text in sentences(load(folder)) if text.startswith("Above sa's window")]
    assert said.startswith(
        "Above sa's window (1e-1 to 1e0) sc's NLL is 0.300 nats lower than sa's (95 %: −1.045 to +0.445"
    )
    assert re.search(r"\): undecided: needs about \d+ seeds in all\.$", said)
    nlls["sc"] = (2.2, 2.0, 2.5, 3.2)
    folder = write_study(tmp_path / "worse", mechanisms=list(nlls), lrs=RATES, seeds=3, nll=nll)
    assert not [text for text in sentences(load(folder)) if text.startswith("Above sa's window")]


def test_a_finding_against_a_paper_is_marked_where_the_table_says_not_supported():
    claims = [
        Claim(name, verdict, statement=name, n=3, paper=paper, finding=f"{name} is so", interval="95 %: 1 to 2", test=(name,))
        for name, verdict, paper in (("a", "holds", CONSENSUS), ("b", "contradicted", CONSENSUS), ("c", "contradicted", ""))
    ]  # fmt: skip
    assert _say_supported(claims, 4, 3) == (
        "Established (n = 3): a is so (95 %: 1 to 2); b is so (95 %: 1 to 2; against the paper's claim); "
        "c is so (95 %: 1 to 2)."
    )


def test_the_first_failure_is_that_of_any_seed(tmp_path):
    statuses = {("sa", 1e-1, 1): ("diverged", "planted"), ("sa", 1.0, 0): ("plateaued", "planted")}
    found = study_of(tmp_path, {"sa": (2.2, 2.0, 2.05, 2.1)}, statuses=statuses)
    (row,) = answer_table(found).rows
    assert row[answer_table(found).header.index("first failure")].text == "1e-1: 1/3 diverged"
    exploded = study_of(tmp_path / "exploded", {"sa": (2.2, 2.0, 205.0, 3.3)})
    failure = first_failure(exploded, "sa", windows(exploded)["sa"].median)
    assert failure.kind == "exploded" and failure.clause == "at 1e-1 it explodes, beyond it learns nothing"
    unbroken = study_of(tmp_path / "unbroken", {"sa": (2.2, 2.0, 2.05, 2.1)})
    assert first_failure(unbroken, "sa", windows(unbroken)["sa"].median) is None


def test_equal_runs_are_no_finding_if_only_their_untrained_nlls_differ(tmp_path):
    folder = write_study(
        tmp_path, mechanisms=["sa", "sc"], lrs=RATES, seeds=3, nll=lambda _, lr, __: math.inf if lr > 0.05 else 2.0
    )
    path = folder / "results" / "runs.parquet"
    runs = pd.read_parquet(path)
    runs.loc[runs["mechanism"] == "sc", "init_nll"] -= 0.003
    write_table(path, "runs", runs)
    (claim,) = [each for each in judge(load(folder)) if each.about == (BEYOND, "sc")]
    assert claim.difference == "+0.000 nats" and claim.verdict == "undecided"


def test_runs_that_fail_in_several_ways_name_them(tmp_path):
    statuses = {("sa", 1e-1, 0): ("diverged", "planted"), ("sa", 1e-1, 1): ("plateaued", "planted")}
    found = study_of(tmp_path, {"sa": (2.2, 2.0, 2.05, 2.1)}, statuses=statuses)
    failure = first_failure(found, "sa", windows(found)["sa"].median)
    assert failure.clause == "at 1e-1, 2 of 3 diverge or learn nothing"
    mixed = study_of(tmp_path / "on", {"sa": (2.2, 2.0, math.inf, 3.3)})
    assert (
        first_failure(mixed, "sa", windows(mixed)["sa"].median).clause
        == "at 1e-1 it diverges, beyond it learns nothing"
    )


def test_title_table_and_sentences_agree_on_what_has_learned(tmp_path):
    unknown = study_of(tmp_path / "a", {"sa": (2.2, 2.0, 2.4, 3.1)}, unigram=math.nan)
    assert title(unknown).endswith("sa to between 1e-2 and 1e-1")
    little = study_of(tmp_path / "b", {"sa": (3.19, 3.185, 3.3, 3.3)})
    assert title(little).endswith("? No mechanism learned enough at the rates swept")
    assert answer_table(little).rows[0][3].text == "learned too little"
    queued = {("sa", lr, seed): ("queued", "") for lr in RATES for seed in range(3)}
    assert title(study_of(tmp_path / "c", {"sa": (2.0,) * 4}, statuses=queued)).endswith("? Not run yet")
    idle = study_of(tmp_path / "d", {"sa": (3.3,), "sc": (3.4,)}, rates=(1e-2,))
    assert title(idle) == "Which has the lowest NLL at the learning rate 1e-2? None has learned anything"


def test_the_figure_and_the_tables_have_one_word_for_a_mechanism_that_learned_too_little(tmp_path):
    """sw gains 0.25 of sa's 1.2 nats: its bar was "learned nothing", its row had the widest window of all."""
    nlls = {"sa": (2.2, 2.0, 2.4, 3.1), "sw": (2.99, 2.95, 2.97, 3.0), "echo": (3.3, 3.25, 3.3, 3.3)}
    study = study_of(tmp_path, nlls)
    rows = {row[0].text: [cell.text for cell in row] for row in answer_table(study).rows}
    assert rows["sw"][1:6] == ["1e-2", "2.950", "learned too little", "--", "--"]
    assert rows["echo"][1:6] == ["--", "3.250", "learned nothing", "--", "--"]
    drawn = [text.get_text() for text in nll_figure(study).axes[-1].texts]
    widths = [text.get_text().strip() for text in window_figure(study).axes[0].texts]
    for texts in (drawn, widths):
        assert texts.count("learned too little") == texts.count("learned nothing") == 1
    assert (
        title(study)
        == "How far can the learning rate be pushed within 5 % of sa’s best NLL? sa to between 1e-2 and 1e-1"
    )
    assert "sw: take 1e-2; learned too little for a window" in answer(study)
    assert not any(
        LEARNED_NOTHING in cell.text for cell in answer_table(study_of(tmp_path / "b", {"sa": nlls["sa"]})).rows[0]
    )


def test_the_end_of_a_sweep_names_fewer_findings_rather_than_none(tmp_path):
    nlls = {name: (2.2 - 0.1 * place, 2.0 - 0.1 * place, 2.4 - 0.2 * place, 3.1 - 0.3 * place)
            for place, name in enumerate(("sa", "sc", "mix", "sw"))}  # fmt: skip
    found = study_of(tmp_path, nlls)
    lines = answer(found).splitlines()
    assert len(lines) <= MOST_LINES and any(line.startswith("Established (n = 3): ") for line in lines)


def test_two_seeds_name_what_they_indicate_and_how_much(tmp_path):
    nlls = {"sa": (2.2, 2.0, 2.4, 3.1), "sc": (2.1, 1.9, 2.3, 3.0)}
    first, second = sentences(study_of(tmp_path, nlls, seeds=2))[:2]
    assert first.startswith("With two seeds no difference") and "indicated (n = 2)" in first
    assert re.search(r"(more seeds|more runs\))\. Indicated by two seeds alone: \d+\.", second)


def test_the_decided_claims_of_papers_are_counted_beside_the_open_comparisons():
    """Those with an effect in numbers have a sentence of their own; of two seeds nothing is decided."""
    claims = [
        Claim("a", "undecided", statement="a", n=3, test=("a",)),
        *(Claim(name, "contradicted", statement=name, n=12, paper=CONSENSUS, test=(name,)) for name in "bc"),
        Claim("d", "holds", statement="d", n=3, paper=CONSENSUS, test=("d",)),
        Claim("e", "holds", statement="e", n=3, paper=CONSENSUS, finding="e's window is wider", test=("e",)),
        Claim("f", "holds", statement="f", n=15, paper=CONSENSUS, finding="f's matrices are exact"),
    ]
    assert _say_undecided(claims) == (
        "Undecided: 1 of 5 comparisons (appendix); they need more seeds. Claims of papers: 1 supported and 2 not supported."
    )
    assert _say_undecided(claims[:1]).endswith("they need more seeds.")


def test_the_sentence_on_alpha_max_has_the_smallest_and_the_largest_ratio(tmp_path):
    nlls = {"sa": (2.2, 2.0, 2.4, 3.1), "sc": (2.2, 2.0, 2.4, 3.1)}
    ratios = {"sa": 0.5, "sc": 8.0}
    found = study_of(tmp_path, nlls, alpha=lambda name, lr, seed, state: [ratios[name] * lr] * 5)
    assert sentences(found)[-1].startswith("At the best rates α_max / α is 0.5 (sa) to 8 (sc): below 1")
    table = next(piece for part in assembly.pieces(found) for piece in part if isinstance(piece, Table))
    column = table.header.index("α_max/α")
    assert [row[column].text for row in table.rows] == ["0.5", "8"]


def test_what_was_run_counts_runs_and_spells_names_out(tmp_path):
    statuses = {("sa", 1.0, seed): ("diverged", "planted") for seed in range(3)}
    found = study_of(tmp_path, {"sa": (2.2, 2.0, 2.4, 3.1), "sc": (2.2, 2.0, 2.4, 3.3)}, statuses=statuses)
    said = describe_runs(found)
    assert "2 mechanisms × 4 learning rates (1e-3 to 1e0) × 3 seeds: 24 runs" in said
    assert "3 diverged" in said and "sa: softmax self-attention; sc: self-consensus" in said


def test_what_was_run_is_no_product_where_series_have_rates_of_their_own(tmp_path):
    found = study_of(tmp_path, {"sa": (2.2, 2.0, 2.4, 3.1), "sc": (2.2, 2.0, 2.4, 3.3)})
    runs = found.runs[(found.runs["series"] == "sa") | (found.runs["lr"] > found.runs["lr"].min())]
    said = describe_runs(replace(load(found), runs=runs))
    assert "2 mechanisms, 4 learning rates in all (1e-3 to 1e0), 3 seeds: 21 runs" in said


def test_every_mechanism_with_an_abbreviated_name_is_spelled_out():
    from analysis.study.naming import SPELLED

    words = {"bigbird", "gated_deltanet", "gated_softmax", "longformer", "sigmoid", "sparse_transformer",
             "two_way"}  # fmt: skip
    others = {*Registry("objectives").names(), *Registry("residuals").names()}
    assert set(Registry("mechanisms").names()) == {*words, *SPELLED} - others


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A study read once, so that its tables and figures are made once for all tests of the file."""
    return load(write_study(tmp_path_factory.mktemp("quick"), name="quick", seeds=3, alpha=quickstart_alpha))


def test_signals_of_a_break_are_one_sentence():
    def claim(name, verdict, steps, n=4):
        return Claim(f"signal {name}", verdict, n=n, effect=f"{steps} steps", test=(signals.TEST, name))

    later = [claim("mean log Z", "contradicted", "−16.8"), claim("largest logit", "contradicted", "−14.3")]
    unknown = [claim("gradient norm", "undecided", "+1.0"), claim("update norm", "holds", "+9.0", n=2)]
    assert _say_signals([*later, *unknown]) == (
        "Longer lead before a break than the training loss: no signal; shorter: mean log Z (−16.8 steps) and "
        "largest logit (−14.3 steps). A break without warning counts as a lead of 0; all less the lead by chance (n = 4)."
    )
    earlier = claim("gradient norm", "holds", "+12.0", n=6)
    assert _say_signals([*later, earlier]).startswith(
        "Longer lead before a break than the training loss: gradient norm (+12.0 steps); shorter: mean log Z"
    )
    assert _say_signals(unknown) == ""


def test_the_first_page_has_one_figure_one_table_and_the_sentences(quick):
    front = next(iter(assembly.pieces(quick)))
    kinds = [type(piece).__name__ for piece in front]
    assert kinds[:5] == ["Paragraph", "Picture", "Table", "Boxed", "Small"] and kinds[5] == "PageBreak"
    names = [piece.name for piece in front if isinstance(piece, Picture)]
    assert names == ["nll", "alpha-in-brief", "curves-in-brief"]


def test_a_full_first_page_leaves_the_sentence_on_alpha_max_to_its_table(tmp_path, monkeypatch):
    nlls = {"sa": (2.2, 2.0, 2.4, 3.1), "sc": (2.2, 2.0, 2.4, 3.1)}
    found = study_of(tmp_path, nlls, alpha=lambda name, lr, *_: [2 * lr] * 4)

    def read():
        (boxed,) = [each for each in next(iter(assembly.pieces(found, pages="short"))) if isinstance(each, Boxed)]
        return boxed.paragraphs

    whole = read()
    assert whole[-1].startswith("At the best rates α_max / α is")
    monkeypatch.setattr(front, "MOST_LINES_LOW", 5)
    assert read() == whole[:-1]
    open_one, decided = "Above sa's window (1e-1) sc's NLL is 0.1 nats lower than sa's: {}", "supported (n = 3)."
    assert is_in_a_table(open_one.format("undecided: needs about 4 seeds in all."))
    assert not is_in_a_table(open_one.format(decided)) and not is_in_a_table("Undecided: 2 of 3 comparisons.")


def test_at_one_rate_the_first_page_has_the_learning_curves(quick):
    study = load(quick)
    runs = study.runs[study.runs["lr"] == study.runs["lr"].min()]
    curvature, curves = (frame[frame["run_id"].isin(runs["run_id"])] for frame in (study.curvature, study.curves))
    first = next(iter(assembly.pieces(replace(study, runs=runs, curvature=curvature, curves=curves))))
    end = next(place for place, piece in enumerate(first) if isinstance(piece, PageBreak))
    assert [piece.name for piece in first[:end] if isinstance(piece, Picture)] == ["curves-in-brief"]
    assert "curves-in-brief" not in [piece.name for piece in first[end:] if isinstance(piece, Picture)]


def test_no_figure_appears_twice(quick):
    for pages in ("short", "all"):
        names = [
            each.name for part in assembly.pieces(quick, pages=pages) for each in part if isinstance(each, Picture)
        ]
        assert len(names) == len(set(names))


def test_a_short_report_has_every_section_names_what_it_lacks_and_fits_four_pages(quick, tmp_path):
    def headings(pages):
        return [each.text for part in assembly.pieces(quick, pages=pages) for each in part if isinstance(each, Heading)]

    first_pages = {"Learning curves", "Runs that diverged, failed, or learned nothing"}  # curves and counts
    assert set(headings("all")) - set(headings("short")) == first_pages
    short = pypdf.PdfReader(build_together([quick], "quick", tmp_path / "short", "short"))
    whole = pypdf.PdfReader(build_together([quick], "quick", tmp_path / "all", "all"))
    assert len(short.pages) <= 4 < len(whole.pages)
    first = " ".join(short.pages[0].extract_text().split())
    assert first.startswith("How far can the learning rate be pushed")
    assert "Table 1: Best learning rates" in first and "Figure 1" in first
    text = " ".join(" ".join(page.extract_text() for page in short.pages).split())
    assert "Not here (pages=all, or format=files): “Stable windows”" in text


def test_a_short_report_names_a_table_that_continues_with_other_series(tmp_path):
    def missing(*mechanisms):
        study = load(write_study(tmp_path / str(len(mechanisms)), mechanisms=mechanisms))
        return str(list(assembly.pieces(study, pages="short")))

    assert (
        "Not here (pages=all, or format=files): “Validation NLL against learning rate” of the other series"
        in missing("sa", "sc", "mix", "sw", "gla", "mamba", "fox")
    )
    assert "of the other series" not in missing("sa", "sc")


def test_a_short_report_lists_failed_runs_and_leaves_those_that_learned_nothing_to_the_table_of_nlls(tmp_path):
    statuses = {("sa", 1e-1, 0): ("failed", "out of memory"), ("sa", 1.0, 1): ("plateaued", "planted")}
    found = study_of(tmp_path, {"sa": (2.2, 2.0, 2.05, 2.1)}, statuses=statuses)
    *_, last = assembly.pieces(found, pages="short")
    (table,) = [each for each in last if isinstance(each, Table)]
    assert [row[4].text for row in table.rows] == ["failed"]
    assert table.caption.endswith("Counted in the table of NLLs, not here: 1 learned nothing.")
    whole = trouble_table(found)
    assert len(whole.rows) == 2 and "Counted in" not in whole.caption
    statuses.pop(("sa", 1e-1, 0))
    found = study_of(tmp_path / "counted", {"sa": (2.2, 2.0, 2.05, 2.1)}, statuses=statuses)
    headings = [each.text for pieces in assembly.pieces(found, pages="short") for each in pieces if is_heading(each)]
    assert "Validation NLL and the stable window" in headings and not {TROUBLED, alpha.TITLE} & {*headings}
    assert {TROUBLED, alpha.TITLE} <= {
        each.text for part in assembly.pieces(found) for each in part if is_heading(each)
    }


def test_a_reason_has_no_number_of_many_digits(tmp_path):
    reason = "smoothed loss rose 17305677.07 nats above its minimum by step 11433 and came back"
    found = study_of(tmp_path, {"sa": (2.2, 2.0, 2.05, 2.1)}, statuses={("sa", 1e-1, 0): ("spiked", reason)})
    (row,) = trouble_table(found).rows
    assert row[-1].text == "smoothed loss rose 1.7e7 nats above its minimum by step 11433 and came back"


def test_the_caption_of_widths_names_common_windows_only_where_there_are_some(tmp_path):
    shared = study_of(tmp_path, {"sa": (2.2, 2.0, 2.4, 3.1), "sc": (2.2, 2.0, 2.4, 3.1)})
    alone = study_of(tmp_path / "one", {"sa": (2.2, 2.0, 2.4, 3.1)})
    for found, is_there in ((shared, True), (alone, False)):
        caption = nll_figures.figures(found)[nll_figures.WINDOW].caption
        assert ("common" in caption) is is_there and ("Number: both" in caption) is is_there


def test_studies_side_by_side_count_the_series_that_have_no_row(many, quick):
    assert "Not here: 6 further series of synthetic." in comparison_table([quick, many]).caption
    assert "Not here" not in comparison_table([quick, quick]).caption


def is_heading(piece):
    return isinstance(piece, Heading)


def test_a_report_of_several_studies_leaves_out_what_their_front_pages_answer(quick):
    def read(prefix, pages):
        parts = [part for pieces in assembly.pieces(quick, prefix, pages) for part in pieces]
        return [part.text for part in parts if is_heading(part)], str(parts)

    both, words = read("0-", "short")
    assert "What was run" in both and alpha.TITLE not in both
    assert words.count(f"{ELSEWHERE}: validation NLLs and windows, α") == 1
    for headings, more in (read("", "short"), read("0-", "all")):
        assert alpha.TITLE in headings and ELSEWHERE not in more


def test_studies_together_are_compared_on_the_first_page(quick, tmp_path):
    other = study_of(tmp_path, {"sa": (2.2, 2.0, 2.4, 3.1), "gla": (2.1, 1.9, 2.0, 2.4)}, rates=RATES)
    pieces = assembly.comparison([quick, other])
    boxed, picture, table = pieces
    assert isinstance(boxed, Boxed)
    question, *answers, names = boxed.paragraphs
    assert question.startswith("How far can the learning rate be pushed within 5 % of") and question.endswith("?")
    assert [text.partition(" (")[0] for text in answers] == ["quick", "synthetic"]
    assert all("How far" not in text and "Lowest NLL: " in text for text in answers)
    assert "gla: gated linear attention" in names
    assert isinstance(picture, Picture) and len(picture.figure.axes) == 2
    assert isinstance(table, Table) and [row[0].text for row in table.rows] == ["sa", "sc", "mix", "sw", "sa", "gla"]
    assert [row[0].detail for row in table.rows] == ["quick", "", "", "", "synthetic", ""]
    first = pypdf.PdfReader(build_together([quick, other], "both", tmp_path, "short")).pages[0].extract_text()
    assert "The studies side by side" in first.replace("\n", " ")
    written = {path.relative_to(tmp_path).as_posix() for path in export_together([quick, other], tmp_path)}
    assert written == {
        *(f"figures/together-studies.{suffix}" for suffix in ("pdf", "svg", "png")),
        *(f"tables/together-the-studies-side-by-side.{suffix}" for suffix in ("csv", "md", "tex", "parquet")),
    }
    written = (tmp_path / "tables" / "together-the-studies-side-by-side.md").read_text("utf-8")
    assert FINGERPRINT[:12] in written, "a table that stands alone names its data"
    assert assembly.comparison([other]) == ()
    assert assembly.joint_question([quick, other], "both") == (  # both answers are too long for one title
        "Which has the lowest NLL, and at which learning rate? quick: sc at 1e-2 (2.861); synthetic: gla at 1e-2 (1.900)",
        "",
    )
    alone = study_of(tmp_path / "alone", {"sa": (2.2,)}, rates=RATES[:1])
    assert assembly.joint_question([quick, alone], "both") == (
        "Which has the lowest NLL, and at which learning rate? "
        f"quick: {lowest_nll(quick)}; synthetic: {lowest_nll(alone)}",
        "",
    )
    assert assembly.joint_question([other], "both") == ("Learning-rate stability: both", "synthetic"), (
        "nothing to compare"
    )


def test_another_mechanism_that_goes_as_far_is_no_variant_of_the_reference(tmp_path):
    """An ablation's title ranks its series; a rate that both reach stands once."""
    nlls = {"sa": (2.2, 2.0, 2.4, 3.1), "attentionx": (2.2, 1.95, 2.4, 3.1)}
    folder = write_study(
        tmp_path, mechanisms=list(nlls), lrs=RATES, seeds=3, settings=({"variant": ""}, {"variant": "mask_diagonal=true"}),
        nll=lambda name, lr, seed: nlls[name][RATES.index(lr)] + 0.001 * seed,
    )  # fmt: skip
    said = title(load(folder))
    assert said.endswith("? sa to between 1e-2 and 1e-1, no series further on this grid"), "nor is one of them named"


def test_a_reference_with_a_cross_mechanism_is_in_the_table_of_variants_and_spelled_out(tmp_path):
    """Its series is sa+ca; a series that learned too little has no place in the ranking."""
    nlls = {"sa": (2.2, 2.0, 2.4, 3.1), "sc": (2.2, 2.0, 2.01, 2.4)}
    shift = {"": 0.0} | {f"rank={rank}": 1.1 if rank == 2 else 0.01 for rank in range(1, 7)}
    settings = [{"variant": variant, "cross": "ca"} for variant in shift]
    folder = write_study(tmp_path, mechanisms=list(nlls), lrs=RATES, seeds=3, settings=settings)
    runs = pd.read_parquet(folder / "results" / "runs.parquet")
    runs = runs[(runs["mechanism"] == "sc") | (runs["variant"] == "")]
    runs["val_nll"] = [
        nlls[run.mechanism][RATES.index(run.lr)] + shift[run.variant] + 0.001 * run.seed for run in runs.itertuples()
    ]
    write_table(folder / "results" / "runs.parquet", "runs", runs.to_dict("records"))
    study = load(folder)
    lost = next(name for name in study.series if "rank=2" in name)
    assert unlearned_words(study)[lost], "nearly nothing"
    assert rank_variants(study)[-1] == lost and not any(lost in text for text in sentences(study))
    assert "sa+ca" in best_series(study) and "sa: softmax self-attention" in describe_runs(study)


def test_rates_that_each_series_has_for_itself_are_no_grid(tmp_path):
    study = study_of(tmp_path, {"sa": (2.2, 2.0, 2.4, 3.1), "sc": (2.2, 2.0, 2.4, 3.1)})
    runs = study.runs
    apart = runs[(runs["mechanism"] == "sa") == (runs["lr"] < 5e-2)]
    assert describe_runs(replace(study, runs=apart)).startswith(
        "2 mechanisms × 2 of 4 learning rates (1e-3 to 1e0) × 3"
    )


def test_of_many_series_the_second_page_draws_those_of_the_first_and_counts_them(many):
    second = [each for part in assembly.pieces(many, pages="short") for each in part if isinstance(each, Picture)]
    found = {each.name: each for each in second}
    titles = [ax.get_title(loc="left") for ax in found["curves-in-brief"].figure.axes]
    assert titles == ["m00", *best_series(many)[:3]] == ["m00", "m11", "m10", "m09"], "the reference, then the best"
    assert found["curves-in-brief"].caption.endswith(" 4 of 12 series; pages=all draws the others.")


def test_one_rate_has_a_ranking_and_no_window(tmp_path):
    nlls = {"sa": (2.5,), "sc": (2.2,)}
    found = study_of(tmp_path / "two", nlls, rates=(1e-2,))
    assert title(found) == "Which has the lowest NLL at the learning rate 1e-2? sc (2.200) and sa (2.500)"
    assert answer_table(found).header == ("mechanism", "best LR", "NLL")
    alone = study_of(tmp_path / "one", {"sa": (2.5,)}, rates=(1e-2,))
    assert title(alone) == "How well does sa learn at the learning rate 1e-2? NLL 2.500"
    lost = study_of(tmp_path / "lost", {"sa": (math.inf,)}, rates=(1e-2,))
    assert title(lost) == "How well does sa learn at the learning rate 1e-2? Every run diverged"


PLACES = "Stable windows|≥ 0.00|decades|own window|sensitivity"


def test_a_study_of_one_rate_prints_no_windows_and_says_why(tmp_path):
    """Its table had "≥ 0.00" decades in every cell, and the paper's claims on windows were counted as undecided."""
    nlls = {"sa": (2.5,), "sc": (2.2,), "mix": (2.4,), "gla": (2.6,)}
    study = study_of(tmp_path, nlls, rates=(1e-2,))
    text = summary(study)
    assert "\nA single learning rate makes neither a curve nor a stable window, so none are compared.\n" in text
    assert not {"Stable windows", "≥ 0.00", "decades", "own window", "sensitivity"} & set(re.findall(PLACES, text))
    claims = {claim.subject: claim for claim in judge(study)}
    assert claims["window"].text == "Not judged: a single learning rate has no window."
    assert claims["mix window"].verdict == "not judged" and claims["mix best NLL"].verdict == "holds"
    two = summary(study_of(tmp_path / "two", {name: (2.5, *nll) for name, nll in nlls.items()}, rates=(1e-3, 1e-2)))
    assert "Stable windows" in two and "A single learning rate" not in two and "sensitivity" in two


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    nlls = {f"m{place:02d}": (2.5 - 0.01 * place, 2.0 - 0.01 * place, 2.4, 3.1) for place in range(12)}
    return study_of(tmp_path_factory.mktemp("many"), nlls)


def test_of_many_series_the_first_figure_shows_those_of_the_table(many):
    front, *_ = assembly.pieces(many, pages="short")
    (figure,) = [each for each in front if isinstance(each, Picture) and each.name == "nll-in-brief"]
    (table,) = [each for each in front if isinstance(each, Table)]
    drawn = [label.get_text() for label in figure.figure.axes[1].get_yticklabels()]
    best = [f"m{place:02d}" for place in range(11, 5, -1)]
    assert drawn == [row[0].text for row in table.rows] == [*best[:5], "m00"], "the reference, too"
    assert "m00 and the 5 series with the lowest NLLs; appendix: all." in figure.caption
    beside = replace(many, study={**many.study, "reference": "m10"})
    assert best_series(beside) == best and lists_reference(beside) == "", "the reference is one of them"
    names = [each.name for pieces in assembly.pieces(many) for each in pieces if isinstance(each, Picture)]
    assert "nll" in names, "the appendix has all curves"


def test_the_first_page_of_many_series_fits_one_page(many, tmp_path):
    pdf = build_together([many], "many", tmp_path, "short")
    pages = [page.extract_text() for page in pypdf.PdfReader(pdf).pages]
    assert "best LR" in pages[0] and "commit" in pages[0], "the line of provenance ends the first page"


def test_a_report_drawn_anew_names_the_commits_that_trained_its_runs(tmp_path):
    folder = write_study(tmp_path, mechanisms=["sa"], lrs=RATES)
    record = json.loads((folder / "study.json").read_text())
    by = {"commit": "c" * 40, "dirty": False, "cpu": "another processor", "runs": 8}
    (folder / "study.json").write_text(json.dumps({**record, "trained_by": [by]}))
    line = provenance_line(load(folder))
    assert "its runs by commit cccccccccccc on another processor (8 runs)" in line and "AMD" not in line
    own = {**by, "commit": record["provenance"]["commit"]}
    (folder / "study.json").write_text(json.dumps({**record, "trained_by": [own]}))
    assert "AMD" in provenance_line(load(folder)) and "its runs by" not in provenance_line(load(folder))


def test_the_first_page_says_in_one_line_that_little_was_learned(tmp_path):
    """The appendix alone said so, of models that had learned 4 % of the frequencies' NLL."""

    def first_sentence(nlls, name):
        front_page = next(iter(assembly.pieces(study_of(tmp_path / name, nlls), pages="short")))
        (boxed,) = [each for each in front_page if isinstance(each, Boxed)]
        return boxed.paragraphs[0]

    few = {"sa": (3.4, 0.96 * UNIGRAM, 3.4, 3.9), "sc": (3.4, 0.97 * UNIGRAM, 3.4, 3.9)}
    said = first_sentence(few, "few")
    assert said == "Little was learned beyond token frequencies: 3.0 to 4.0 % of their NLL."
    assert len(said) < front.LINE
    apart = first_sentence({**few, "sc": (3.4, 0.9 * UNIGRAM, 3.4, 3.9)}, "apart")
    assert apart == "Little was learned beyond token frequencies by sa: 4.0 % of their NLL."
    assert first_sentence({"sa": (2.2, 2.0, 2.4, 3.1), "sc": (2.2, 2.0, 2.4, 3.1)}, "much").startswith("Lowest NLL")
