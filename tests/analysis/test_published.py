"""The papers' printed numbers, and what their claims come to on them."""

from pathlib import Path

import pytest

from analysis import published
from analysis.claims import published as judged

PAPER = Path(__file__).resolve().parents[3] / "shared" / "papers" / "000_198914c423274d83.txt"


def claims():
    return {claim.statement: claim for claim in judged.claims()}


def test_every_number_stands_in_the_papers_text_in_its_own_row():
    if not PAPER.exists():
        pytest.skip(f"the paper's text is not there: {PAPER}")
    rows = [line for line in PAPER.read_text().splitlines() if line.startswith("|")]
    for source in (published.NLL, published.ALPHA_MAX):
        for line in (published.FOLDER / source.file).read_text().splitlines()[1:]:
            *_, lr, first, second = line.split(",")
            named = lr if source is published.ALPHA_MAX else line.split(",")[4].upper()
            hits = [row for row in rows if named in row and all(f" {each} " in row for each in (first, second) if each)]
            assert hits, line


@pytest.mark.parametrize(
    ("source", "rows"), [(published.NLL, 44), (published.ALPHA_MAX, 144), (published.ABLATION, 12)]
)
def test_the_tables_are_whole(source, rows):
    table = published.numbers(source)
    assert len(table) == rows
    assert set(table["mechanism"]) <= {"sa", "sc", "sw", "mix"} if "mechanism" in table else True
    table.iloc[0, 0] = None  # a caller's own copy
    assert published.numbers(source).iloc[0, 0] is not None


def test_alpha_max_tables_have_each_mechanism_in_every_cell():
    table = published.numbers(published.ALPHA_MAX)
    assert set(table.groupby(["table", "size", "lr"]).size()) == {4}
    dash = table[table["median_alpha_max"].isna()]
    assert dash[["table", "mechanism", "lr", "percent_stable"]].to_numpy().tolist() == [["5", "sa", 5e-3, 0]]


def test_five_printed_shares_are_of_no_25_steps_and_all_of_them_of_15():
    """A finding on the paper's tables, which its text does not explain; said where the numbers are."""
    table = published.numbers(published.ALPHA_MAX)
    odd = table[table["percent_stable"] % 4 != 0]
    assert odd[["table", "size", "percent_stable"]].to_numpy().tolist() == [
        ["5", "54M", 67], *(["8a", "54M", share] for share in (53, 7, 27, 7))
    ]  # fmt: skip
    assert {int(share) for share in odd["percent_stable"]} <= {round(100 * count / 15) for count in range(16)}
    assert "five shares of text 54M cannot be" in published.ALPHA_MAX.says


def test_sc_has_the_wider_window_where_both_are_printed():
    found = [claim for statement, claim in claims().items() if statement.startswith("sc has a wider window")]
    assert [claim.verdict for claim in found] == ["holds", "holds"]


def test_a_window_counts_the_rates_at_which_both_were_trained():
    """mix was trained at four of sa's eight rates (Table 2): sa's window ends there, too."""
    text = claims()["mix has a wider window than sa (text 385M, validation NLL)"].text
    assert (
        text
        == "Text 385M, validation NLL: mix 0.53 decades (7.831e-5 to 2.625e-4) and sa 0.51 decades (7.998e-5 to 2.598e-4)."
    )


def test_where_the_narrower_window_is_open_the_order_is_that_of_the_printed_rates_alone():
    """Table 3: sa's best is its last rate, 7.5e-4, so that its 0.07 decades are a lower bound."""
    found = claims()
    assert found["mix has a wider window than sa (DNA 331M, generative NLL)"].text == (
        "DNA 331M, generative NLL: mix at least 0.88 decades (1e-4 to 7.5e-4, open at the low and high ends) and sa at "
        "least 0.07 decades (6.457e-4 to 7.5e-4, open at the high end). That is within the printed rates: beyond them "
        "the order may be another."
    )
    assert "beyond" not in found["sc has a wider window than sa (text 385M, validation NLL)"].text


def test_mix_mirrors_the_best_of_sa_in_every_grid():
    found = [claim for statement, claim in claims().items() if statement.startswith("mix mirrors sa")]
    assert len(found) == 8
    assert {claim.verdict for claim in found} == {"holds"}
    assert max(float(claim.effect.split()[0].replace("−", "-")) for claim in found) == 1.2


def test_the_papers_sentence_on_alpha_max_is_not_what_its_tables_say():
    """Counted by hand in Tables 5 to 7: of 18 cells sc has the largest median α_max in 8, the highest share, ties
    included, in 16."""
    largest = claims()["SC attains the largest median α_max across all modalities and scales"]
    stable = claims()["SC has the highest share of stable steps across all modalities and scales"]
    assert (largest.verdict, largest.effect) == ("contradicted", "8 of 18 cells")
    assert (stable.verdict, stable.effect) == ("contradicted", "16 of 18 cells")
    assert stable.text.endswith("another has in DNA 172M at 5e-4 (sa) and DNA 51M at 1e-3 (mix).")
    assert "protein 35M at 1e-3 (sa)" in largest.text


def test_each_step_of_the_ablation_lowers_both_nlls():
    found = [claim for statement, claim in claims().items() if statement.startswith("A larger")]
    assert [claim.verdict for claim in found] == ["holds"] * 3


def test_a_number_that_is_changed_changes_the_verdict(monkeypatch):
    changed = published.numbers(published.ABLATION)
    changed.loc[changed["value"] == 64, "generative_nll"] = 5.9
    monkeypatch.setattr(published, "_read", lambda file: changed)
    assert [claim.verdict for claim in judged._improves(published.numbers(published.ABLATION))] == [
        "contradicted",
        "holds",
        "holds",
    ]


@pytest.mark.parametrize(
    ("source", "paper", "rows"),
    [(published.LOSSES, "004_0c96c1e74f535d7c", 24), (published.ACCURACY, "001_c348720b36385bd5", 4)],
)
def test_the_other_papers_tables_are_whole_and_as_printed(source, paper, rows):
    table = published.numbers(source)
    assert len(table) == rows and not table.isna().any(axis=None)
    text = PAPER.with_name(f"{paper}.txt")
    if not text.exists():
        pytest.skip(f"the paper's text is not there: {text}")
    lines = text.read_text().splitlines()
    for line in (published.FOLDER / source.file).read_text().splitlines()[1:]:
        first, second = line.split(",")[-2:]
        printed = f"{first}±{second} " if source is published.ACCURACY else f" {first} | {second} "
        assert any(printed in row for row in lines), line
