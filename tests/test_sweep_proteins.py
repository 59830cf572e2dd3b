"""`generate.num=…` in a sweep of proteins, from the command line to the tables: synthetic chains, a tiny tokenizer, an
oracle of the same tracks."""

from __future__ import annotations

import pandas as pd
import pytest

from stability import sweep
from stability.corpora.proteins import synthetic as _synthetic_proteins
from stability.runs.study import StudyFolder
from tests.structure.small import spec
from tests.structure.small import train as train_tokenizer


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    pytest.importorskip("biotite", reason="biotite, of the extra protein, is not installed")
    with pytest.MonkeyPatch.context() as few:
        few.setattr(_synthetic_proteins, "NUM_CHAINS", 24)
        yield tmp_path_factory.mktemp("proteins") / "runs"


@pytest.fixture(scope="module")
def words(pool):
    identity = train_tokenizer(pool, spec(steps=2, atom_steps=2, warmup_steps=0)).run_id
    return [
        *(
            f"runs_dir={pool}",
            "data=protein",
            "objective=multitrack",
            f"objective.tokenizer={identity}",
            "objective.contexts=[ss,sasa]",
            "cross=auto",
        ),
        *(
            "launcher=serial",
            "device=cpu",
            "seeds=1",
            "steps=4",
            "batch=4",
            "evaluation.every_steps=2",
            "evaluation.sequences=8",
            "hessian=false",
        ),
        *("report=false", "tables=all", "model.layers=1", "model.width=16", "model.heads=2", "model.positions=14"),
    ]


def test_a_sweep_samples_and_scores_proteins_and_shows_their_components(words, pool, capsys):
    assert sweep.main([*words, "mechanism=[sa]", "lr=[1e-3]", "model.width=24", "name=judge"]) == 0
    more = [
        "mechanism=[sa,sc]",
        "lr=[1e-3]",
        "name=small",
        "generate.num=2",
        f"generate.oracle=ckpt:{pool / 'studies' / 'judge'}",
    ]
    capsys.readouterr()
    assert sweep.main([*words, *more]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "Generative NLL against learning rate" in said
        and "Its masked NLL in nats per residue" in said
        and "contexts empty" in said
    )
    assert "Generative NLL by component against learning rate" in said and "nats per byte" not in said
    runs = pd.read_parquet(pool / "studies" / "small" / "results" / "runs.parquet")
    assert len(runs) == 2 and runs.gen_oracle.str.startswith("ckpt:").all()
    assert runs.gen_nll.to_numpy() == pytest.approx((runs.gen_nll_sequence + runs.gen_nll_structure).to_numpy())
    for directory in StudyFolder(pool / "studies" / "small").runs():
        assert {path.name for path in (directory.path / "samples" / "terminal").iterdir()} == {
            "sample_0.cif",
            "sample_1.cif",
        }
        assert len(pd.read_parquet(directory.generation_file("terminal"))) == 2
    assert sweep.main([*words, *more]) == 0 and "skips 2 finished runs" in capsys.readouterr().out
    with pytest.raises(
        ValueError,
        match=r"finished samples with contexts=empty \(asked for: given\) of its terminal checkpoint \(and 1 more\)",
    ):
        sweep.main([*words, *more, "generate.contexts=given"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["generate.num=2", "generate.oracle=evo2:evo2_1b_base"],
            "oracle=evo2:evo2_1b_base reads nucleotides, and these samples are proteins",
        ),
        (
            ["generate.num=2", "generate.contexts=given", "objective.contexts=[]", "cross=none"],
            "contexts=given, and this run reads none",
        ),
        (["generate.contexts=given"], "generate.contexts=given needs the number of samples"),
        (
            ["generate.num=2", "generate.sampler=analytic"],
            "sampler=analytic does not fit objective=multitrack; these do: top_prob, random",
        ),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(words, pool, more, message):
    before = set(pool.glob("*/spec.json"))
    with pytest.raises(ValueError) as caught:
        sweep.main([*words, "mechanism=[sa]", "lr=[3e-3]", *more])
    assert message in str(caught.value) and len(str(caught.value).splitlines()) <= 2
    assert set(pool.glob("*/spec.json")) == before
