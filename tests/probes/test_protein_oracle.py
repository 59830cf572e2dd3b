"""The oracle of sampled proteins against a loop in float64, the table that it leaves, and what a wrong one is told."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from stability.corpora.proteins.alphabets import encode
from stability.corpora.proteins.batch import batch_of
from stability.generate import main
from stability.models import MASK
from stability.models.passes import generator_for
from stability.models.tracks import TrackInputs
from stability.objectives.multitrack import MultitrackMaskedModel
from stability.probes.checkpoints import corpus_of
from stability.probes.generation.generating import check_oracle, is_generated
from stability.probes.generation.kinds import kind_of
from stability.probes.generation.protein_oracle import load_protein_oracle
from stability.runs.results import collect
from stability.runs.schema import COLLECTED_GENERATION_COLUMNS
from stability.runs.study import StudyFolder
from stability.training import checkpoint
from tests.conftest import Lab
from tests.probes.proteins import ProteinLab, forget, generate_spec, sample

LARGER = {"name": "tiny", "layers": 2, "width": 24, "heads": 2, "positions": 22}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs, and those that are to judge them: larger, with contexts that the runs have or have not, for the tracks that
    they predict."""
    lab = ProteinLab(tmp_path_factory.mktemp("proteins"))
    specs = {
        "run": lab.spec(contexts=("ss", "sasa")),
        "bare": lab.spec(),
        "words": lab.spec(contexts=("ss", "domains")),
        "judge": lab.spec(contexts=("ss", "domains"), model=LARGER),
        "letters": lab.spec(sources=("sequence",)),
        "letters_judge": lab.spec(sources=("sequence",), model=LARGER),
        "folds": lab.spec(sources=("structure",)),
        "one": lab.spec(tokenizer=lab.one),
        "short": lab.spec(model={**LARGER, "positions": 16}),
    }
    text = Lab(tmp_path_factory.mktemp("text"))
    return lab, {
        **{name: lab.train(spec) for name, spec in specs.items()},
        "ar": text.train(text.spec(objective={"name": "ar"})),
    }


@pytest.fixture(autouse=True)
def fresh(request):
    yield
    if "trained" in request.fixturenames:
        forget(request.getfixturevalue("trained")[1].values())


def table(directory):
    return pd.read_parquet(directory.generation_file("terminal"))


def chain_of(lab, run, index, found, contexts):
    """Held-out protein ``index`` with a sample's letters and tokens, as it would have been prepared."""
    own = lab.corpus.chains("val")[index].crop(0, run.model.positions - 2)
    unknown = {"ss_N": np.full(len(own), 255, np.uint8)} if "ss" not in contexts else {}
    unknown |= {"sasa_N": np.full(len(own), np.nan, np.float32)} if "sasa" not in contexts else {}
    structure_N = np.full(len(own), -1) if found.structure is None else np.array(found.structure)
    sequence = own.sequence if found.text is None else encode(found.text).astype(np.int64)
    return replace(own, sequence=sequence, structure_N=structure_N, **unknown)


def slowly(oracle, chain, index, draws):
    """Of each track, the mean over draws of the mean over masked positions of −log softmax, each protein in a forward
    pass of its own, by the definition."""
    objective: MultitrackMaskedModel = oracle.objective
    examples = objective.examples(batch_of([chain] * draws), generator_for(0, "oracle", index))
    sizes, totals = (
        [{"sequence": 25, "structure": 175}[name] for name in objective.components],
        [0.0] * len(objective.components),
    )
    for row in range(draws):
        sources = tuple(track[row : row + 1] for track in examples.inputs_BN.sources)
        contexts = tuple(
            track._replace(tokens=track.tokens[row : row + 1], mask=track.mask[row : row + 1])
            for track in examples.inputs_BN.contexts
        )
        with torch.no_grad():
            logits = oracle.model(
                TrackInputs(sources, contexts), mask_BN=torch.ones_like(sources[0], dtype=torch.bool)
            )[0]
        start = 0
        for track, size in enumerate(sizes):
            hidden = [place for place, token in enumerate(sources[track][0].tolist()) if token == MASK]
            truth = encode_of(chain, objective.components[track])
            nats = []
            for place in hidden:
                values = logits[place, start : start + size].tolist()
                nats.append(math.log(sum(math.exp(value) for value in values)) - values[truth[place - 1]])
            totals[track] += sum(nats) / len(nats) / draws
            start += size
    return totals


def encode_of(chain, track):
    return (chain.sequence - 5 if track == "sequence" else chain.structure_N).tolist()


@pytest.mark.parametrize(
    ("name", "judge", "contexts"),
    [
        ("run", "judge", "empty"),
        ("run", "judge", "given"),
        ("letters", "letters_judge", "empty"),
        ("folds", "folds", "empty"),
    ],
)
def test_scores_are_those_of_a_slow_loop_in_float64(trained, name, judge, contexts):
    """``given`` shows the judge what the run was shown, SS and not SASA (which it does not read), nor domains (which
    the run does not)."""
    lab, runs = trained
    spec = sample(lab, runs[name], num=3, contexts=contexts)
    run = checkpoint.load(runs[name].checkpoints()[-1])[0]
    corpus = corpus_of(run, lab.cache)
    scoring = generate_spec(**{**spec.model_dump(), "oracle": f"ckpt:{runs[judge].path}", "oracle_draws": 3})
    oracle = load_protein_oracle(run, scoring, corpus, "cpu")
    oracle = replace(oracle, model=checkpoint.load(runs[judge].checkpoints()[-1])[1].double())
    kind = kind_of(run)
    assert kind is not None
    found = kind.read(runs[name], "terminal", corpus)
    for index, (row, own) in enumerate(zip(oracle.scores(found), found, strict=True)):
        chain = chain_of(lab, run, index, own, ("ss", "sasa") if contexts == "given" else ())
        expected = dict(zip(oracle.objective.components, slowly(oracle, chain, index, 3), strict=True))
        for track in ("sequence", "structure"):
            assert row[f"nll_{track}"] == pytest.approx(expected.get(track, math.nan), rel=1e-6, nan_ok=True)
        assert row["nll"] == pytest.approx(sum(expected.values()), rel=1e-6)
        assert row["num_tokens"] == len(expected) * len(chain)


def test_given_contexts_change_a_score_and_so_do_the_draws(trained):
    lab, runs = trained
    oracle, found = f"ckpt:{runs['judge'].path}", {}
    for name, changes in {"given": {"contexts": "given"}, "empty": {}, "more": {"oracle_draws": 16}}.items():
        spec = sample(lab, runs["run"], num=4, oracle=oracle, **changes)
        assert is_generated(runs["run"], spec)
        found[name] = table(runs["run"])
    assert (found["empty"].nll != found["more"].nll).all() and (found["empty"].nll != found["given"].nll).all()
    assert [set(each.contexts) for each in found.values()] == [{"given"}, {"empty"}, {"empty"}]
    assert set(found["more"].oracle_draws) == {16} and set(found["empty"].oracle_draws) == {8}
    assert found["empty"].nll.mean() == pytest.approx(found["more"].nll.mean(), abs=0.5)


def test_a_table_has_the_components_and_the_runs_of_a_study_their_means(trained):
    lab, runs = trained
    sample(lab, runs["bare"], oracle=f"ckpt:{runs['judge'].path}")
    sample(lab, runs["letters"], oracle=f"ckpt:{runs['letters_judge'].path}", batch=3)
    first, letters = table(runs["bare"]), table(runs["letters"])
    assert list(first.columns) == COLLECTED_GENERATION_COLUMNS and len(first) == 5
    assert first.nll.to_numpy() == pytest.approx((first.nll_sequence + first.nll_structure).to_numpy())
    assert (
        letters.nll.equals(letters.nll_sequence)
        and letters.nll_structure.isna().all()
        and first.nll_per_byte.isna().all()
    )
    assert set(first.oracle) == {f"ckpt:{runs['judge'].run_id}/step_000006"}
    study = StudyFolder.of(lab.pool, "both")
    study.write([runs["bare"].run_id, runs["letters"].run_id])
    collected = collect(study.path).runs.set_index("run_id")
    row = collected.loc[runs["bare"].run_id]
    for column in ("nll", "nll_sequence", "nll_structure"):
        assert row[f"gen_{column}"] == pytest.approx(first[column].mean())
    assert math.isnan(collected.gen_nll_structure[runs["letters"].run_id])


def test_a_score_depends_neither_on_the_other_samples_nor_on_the_batch(trained):
    lab, runs = trained
    oracle = f"ckpt:{runs['judge'].path}"
    sample(lab, runs["bare"], oracle=oracle)
    whole = table(runs["bare"])
    sample(lab, runs["bare"], oracle=oracle, num=2, batch=1)
    assert table(runs["bare"]).nll.to_numpy() == pytest.approx(whole.nll.to_numpy()[:2], rel=1e-5)


def test_a_model_s_own_held_out_proteins_cost_its_validation_nll(trained):
    """With contexts given and many draws, the oracle's score is what validation measures, but for the masks that were
    drawn."""
    lab, runs = trained
    run, _ = checkpoint.load(runs["run"].checkpoints()[-1])
    corpus = corpus_of(run, lab.cache)
    from stability.probes.generation.protein_source import ProteinSample

    chains = [chain.crop(0, run.model.positions - 2) for chain in corpus.chains("val")]
    spec = generate_spec(oracle=f"ckpt:{runs['run'].path}", num=len(chains), contexts="given", oracle_draws=200)
    oracle = load_protein_oracle(run, spec, corpus, "cpu")
    found = [ProteinSample(chain.letters, np.maximum(chain.structure_N, 0).tolist(), chain.id) for chain in chains]
    scores = list(oracle.scores(found))
    sequences = np.mean([row["nll_sequence"] for row in scores])
    assert sequences == pytest.approx(runs["run"].status()["result"]["val_nll_sequence"], abs=0.15)


def test_samples_are_scored_again_by_another_oracle_or_draws_only_if_asked_for(trained):
    _, runs = trained
    words = [f"ckpt={runs['bare'].path}", "num=2", "device=cpu", f"oracle=ckpt:{runs['judge'].path}"]
    assert main(words) == 0
    scored = table(runs["bare"])
    with pytest.raises(
        ValueError,
        match=r"has scores with oracle_draws=8 \(asked for: 3\) of its terminal checkpoint.*;\noverwrite=true replaces",
    ):
        main([*words, "oracle_draws=3"])
    with pytest.raises(ValueError, match=r"has scores of another oracle \(ckpt:\w+/step_000006; asked for: ckpt:"):
        main([*words[:-1], f"oracle=ckpt:{runs['bare'].path}"])
    assert main(words[:-1]) == 0 and table(runs["bare"]).equals(scored)
    written = (runs["bare"].path / "samples" / "terminal.jsonl").stat().st_mtime_ns
    assert main([*words, "oracle_draws=3", "overwrite=true"]) == 0 and set(table(runs["bare"]).oracle_draws) == {3}
    assert (runs["bare"].path / "samples" / "terminal.jsonl").stat().st_mtime_ns == written


def test_words_of_other_data_are_not_shown_to_an_oracle(trained, monkeypatch):
    """They are numbered by the data's own lists; nothing is compared where nothing of them is shown."""
    lab, runs = trained
    run, corpus = checkpoint.load(runs["words"].checkpoints()[-1])[0], lab.corpus
    others = replace(corpus, tables=replace(corpus.tables, domains=(*corpus.tables.domains, "PF00001")))
    monkeypatch.setattr("stability.probes.generation.protein_oracle.corpus_of", lambda *_: others)
    elsewhere = run.model_copy(update={"data_fingerprint": "elsewhere"})
    given = generate_spec(oracle=f"ckpt:{runs['judge'].path}", contexts="given")
    with pytest.raises(
        ValueError,
        match="numbers its domains otherwise than these samples' data, and contexts=given shows it theirs;\ntrain one "
        "on the same",
    ):
        load_protein_oracle(elsewhere, given, corpus, "cpu")
    load_protein_oracle(elsewhere, generate_spec(**{**given.model_dump(), "contexts": "empty"}), corpus, "cpu")
    load_protein_oracle(run, given, corpus, "cpu")
    only_ss = checkpoint.load(runs["run"].checkpoints()[-1])[0].model_copy(update={"data_fingerprint": "elsewhere"})
    load_protein_oracle(only_ss, given, corpus, "cpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["ckpt=BARE", "oracle=evo2:evo2_1b_base"],
            "oracle=evo2:evo2_1b_base reads nucleotides, and these samples are proteins;\ngive oracle=ckpt:FOLDER, a run "
            "with objective=multitrack",
        ),
        (
            ["ckpt=BARE", "oracle=ckpt:AR"],
            "was trained with objective=ar, which scores no proteins;\ngive a run with objective=multitrack",
        ),
        (
            ["ckpt=BARE", "oracle=ckpt:LETTERS"],
            "was trained with objective.sources=[sequence], and these samples are of "
            "objective.sources=[sequence,structure];\ngive a run with objective.sources=[sequence,structure]",
        ),
        (["ckpt=BARE", "oracle=ckpt:ONE"], "was trained with objective.tokenizer="),
        (
            ["ckpt=BARE", "oracle=ckpt:SHORT"],
            "reads 14 residues, and the longest of these samples has 18;\ngive one with model.positions=20 or more",
        ),
        (["ckpt=BARE", "oracle=ckpt:/nothing/there"], "no checkpoint at /nothing/there"),
        (["ckpt=AR", "oracle=ckpt:BARE"], "was trained with objective=multitrack, which gives no NLL of a whole text"),
        (["ckpt=BARE", "contexts=given"], "contexts=given, and this run reads none (objective.contexts=[])"),
        (["ckpt=BARE", "contexts=all"], "contexts='all': input should be 'empty' or 'given'"),
        (["ckpt=BARE", "sampler=euler"], "sampler=euler does not fit objective=multitrack; these do: top_prob, random"),
        (
            ["ckpt=BARE", "steps=5"],
            "steps=5 belongs to sampler=euler and sampler=analytic; sampler=auto is top_prob here",
        ),
        (
            ["ckpt=BARE", "oracle_draws=3"],
            "oracle_draws=3 belongs to an oracle, and none is given; add oracle=ckpt:FOLDER",
        ),
        (
            ["ckpt=BARE", "oracle_draws=0", "oracle=ckpt:BARE"],
            "oracle_draws=0: input should be greater than or equal to 1",
        ),
        (
            ["ckpt=AR", "contexts=given"],
            "contexts=given belongs to samples of proteins (objective=multitrack); objective=ar has no use for it",
        ),
        (
            ["ckpt=AR", "oracle=ckpt:AR", "oracle_draws=3"],
            "oracle_draws=3 belongs to samples of proteins (objective=multitrack)",
        ),
    ],
)
def test_mistakes_are_told_in_two_lines_and_nothing_is_written(trained, words, message):
    _, runs = trained
    for name, directory in runs.items():
        words = [
            word.replace(f"={name.upper()}", f"={directory.path}").replace(f":{name.upper()}", f":{directory.path}")
            for word in words
        ]
    with pytest.raises(ValueError) as caught:
        main([*words, "num=3", "device=cpu"])
    assert message in str(caught.value) and len(str(caught.value).splitlines()) <= 2
    assert not any((directory.path / "samples").exists() for directory in runs.values())


def test_a_missing_tokenizer_is_told_before_anything_is_sampled(trained, monkeypatch):
    lab, runs = trained
    monkeypatch.setattr(
        "stability.objectives.multitrack.MultitrackMaskedModel.track_probs", lambda *_: pytest.fail("sampled")
    )
    place = lab.pool / "tokenizers"
    place.rename(lab.pool / "moved")
    try:
        with pytest.raises(ValueError, match=f"no structure tokenizer {lab.two}"):
            main([f"ckpt={runs['bare'].path}", "num=2", "device=cpu"])
    finally:
        (lab.pool / "moved").rename(place)


def test_the_command_ends_with_exit_code_2_and_no_traceback(trained, entered):
    _, runs = trained
    done = entered(
        "stability.generate", f"ckpt={runs['bare'].path}", "num=2", f"oracle=ckpt:{runs['letters'].path}", "device=cpu"
    )
    assert done.returncode == 2 and done.stderr.startswith("error: oracle=ckpt:") and len(done.stderr.splitlines()) == 2


def test_whoever_only_asks_keeps_no_oracle_in_memory(trained):
    from stability.probes.generation.protein_oracle import _load

    lab, runs = trained
    run = lab.spec()
    check_oracle(run, generate_spec(oracle=f"ckpt:{runs['judge'].path}"), corpus_of(run, lab.cache))
    assert _load.cache_info().currsize == 0
