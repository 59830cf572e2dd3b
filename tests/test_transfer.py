"""``python -m stability.transfer``, on the files of runs with planted NLLs."""

import math

import pytest

from stability import report
from stability.config.identity import run_id
from stability.runs.directory import RunDirectory
from stability.runs.study import StudyFolder
from stability.transfer import main
from tests.analysis.synthetic import words_of
from tests.reading import read_spec

WIDTHS, RATES = (16, 32, 64, 128), [1e-3 * 2**k for k in range(7)]
WORDS = (
    "mechanism=[sa]", "objective=ar", "model.head_width=8", "model.width=[16,32,64,128]", "seeds=2", "hessian=false",
    f"lr=[{','.join(map(str, RATES))}]",
)  # fmt: skip


def write_pool(pool, *words):
    """Runs whose best rate is 1.6e-2 at width 16, and 0.3 decades lower with each doubling under standard."""
    spec = read_spec("sweep", [*WORDS, *words])
    runs = [run for _, run in spec.points("f" * 64)]
    for run in runs:
        directory = RunDirectory(pool, run_id(run))
        directory.write_spec(run.model_dump(mode="json"))
        doublings = math.log2(run.model.width / 16) if run.parametrization.name == "standard" else 0.0
        loss = 2 + 0.3 * (math.log10(run.lr_peak / 1.6e-2) + 0.3 * doublings) ** 2
        result = {"val_nll": loss, "unigram_nll": 3.3, "init_nll": 5.5, "wall_s": 1.0}
        directory.set_status("stable", step=200, num_steps=200, result=result)
    StudyFolder.of(pool, "wide").write(
        [run_id(run) for run in runs],
        spec=spec.model_dump(mode="json"),
        command="python -m stability.sweep name=wide",
        words=words_of("ar"),
    )


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    pool = tmp_path_factory.mktemp("pool")
    write_pool(pool, "parametrization=[standard,mup]")
    return pool


def test_the_rate_of_a_larger_model_is_printed_with_its_interval(pool, capsys):
    assert main(["name=wide", f"runs_dir={pool}", "target.width=256"]) == 0
    text = capsys.readouterr().out
    assert "sa standard: the best rate moves by -0.30 decades" in text and "a doubling of width (drifts)" in text
    assert "sa standard at width 256: take 1.0e-3 (80 %: 7.1e-4 to 1.4e-3)" in text
    assert "sa mup at width 256: take 1.6e-2 (80 %: 1.1e-2 to 2.3e-2)" in text


def test_two_studies_of_one_name_are_refused_as_their_files_and_rows_would_be_taken_for_each_others(pool):
    words, twice = [f"runs_dir={pool}"], "two studies named wide; give one, or rename its folder"
    with pytest.raises(ValueError, match=twice):
        main([f"name=[wide,{pool / 'studies' / 'wide'}]", "target.width=256", *words])
    with pytest.raises(ValueError, match=twice):
        report.main(["name=[wide,wide]", "together=both", *words])


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_read(pool, capsys):
    with pytest.raises(RuntimeError, match="reports_dir=/proc/none: nothing can be written there"):
        report.main(["name=wide", f"runs_dir={pool}", "reports_dir=/proc/none"])
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "figure"),
    [
        (("name=wide", "format=files"), "wide/figures/transfer.pdf"),
        (("name=wide", "format=[files]", "tables=all"), "wide/figures/transfer.pdf"),
        (("name=[wide,again]", "together=both", "format=files"), "both/figures/together-studies.pdf"),
    ],
)
def test_the_figure_for_a_paper_is_named_where_no_pdf_is_made(pool, words, figure, tmp_path, monkeypatch, capsys):
    record = StudyFolder.of(pool, "wide").read()
    StudyFolder.of(pool, "again").write(record["run_ids"], **{key: record[key] for key in ("spec", "command", "words")})
    for name in ("export", "export_together"):
        monkeypatch.setattr(f"analysis.export.{name}", lambda *_, **__: [])
    assert report.main([*words, f"runs_dir={pool}", f"reports_dir={tmp_path}"]) == 0
    assert f"figure for a paper: {tmp_path / figure}" in capsys.readouterr().out.splitlines()


def test_what_cannot_be_predicted_is_said_with_exit_code_0(pool, capsys):
    assert main(["name=[wide]", f"runs_dir={pool}", "target.width=256", "target.layers=12"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "sa mup at width 256 and with 12 layers: cannot predict: the sweep has layers 4 alone, the target 12." in text
    )
    assert "The best rate at width 128 is 1.6e-2." in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "target: a size is missing; give target.width=…, target.layers=…"),
        (("target.width=0",), "target.width=0"),
        (("target.positions=64",), "target.positions"),
    ],
)
def test_bad_targets_are_refused_in_a_line(pool, words, message):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        main(["name=wide", f"runs_dir={pool}", *words])
    assert message in str(error.value)


def test_a_study_of_one_size_is_refused(tmp_path):
    write_pool(tmp_path, "model.width=16")
    with pytest.raises(ValueError, match=r"^wide: no size varies; sweep several, e.g. model.width="):
        main(["name=wide", f"runs_dir={tmp_path}", "target.width=256"])
