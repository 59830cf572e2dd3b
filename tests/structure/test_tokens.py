"""Structure tokens of a corpus, and runs that read them from the first step to α_max."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from stability.build import as_read, build_objective
from stability.config.base import validate
from stability.config.curvature import CurvatureSpec
from stability.config.identity import run_id
from stability.config.parts import part
from stability.config.run import RunSpec
from stability.corpora.cache import load
from stability.corpora.proteins.corpus import ProteinCorpus
from stability.corpora.proteins.split import corpus_of
from stability.objectives import training_examples
from stability.probes.curvature.alpha_max import measure
from stability.runs.directory import RunDirectory, read_jsonl
from stability.structure.tokenizer import load_tokenizer
from stability.training.evaluate import Validation
from stability.training.run import train
from tests.conftest import TINY
from tests.structure.small import chain, spec
from tests.structure.small import train as train_tokenizer
from tests.within import assert_within


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """(pool, id of a tokenizer in it, the chains as they were prepared)."""
    pool = tmp_path_factory.mktemp("pool")
    identity = train_tokenizer(pool, spec(steps=2, atom_steps=0, warmup_steps=0)).run_id
    corpus = corpus_of([chain(seed, 12 + 2 * seed) for seed in range(12)], (), None, "made up", 0.2)
    corpus.save(pool / "cache" / corpus.fingerprint)
    return pool, identity, corpus


def objective(identity: str | None, **settings):
    return part(
        "objectives",
        {
            "name": "multitrack",
            "contexts": [],
            **({"tokenizer": identity} if identity else {"sources": ["sequence"]}),
            **settings,
        },
    )


def run_spec(lab, **changes) -> RunSpec:
    pool, identity, corpus = lab
    goal = changes.pop("objective", objective(identity))
    values = {
        **TINY,
        "model": {**TINY["model"], "positions": 20},
        "objective": goal,
        "data": {"name": "protein"},
        "steps": 6,
        "evaluation": {"every_steps": 3, "sequences": 8},
        "data_fingerprint": as_read(corpus, goal, pool).fingerprint,
    }
    return validate(RunSpec, values | changes)


def test_every_residue_has_the_token_of_its_whole_chain_and_crops_keep_them(lab):
    pool, identity, corpus = lab
    read, tokenizer = as_read(corpus, objective(identity), pool), load_tokenizer(pool, identity)
    for split in ("train", "val"):
        for own, whole in zip(corpus.chains(split), read.chains(split), strict=True):
            mask_BN = torch.from_numpy(own.mask_N)[None]
            coords = torch.from_numpy(np.nan_to_num(own.coords_NAX))[None]
            expected = tokenizer.encode(coords, mask_BN)[0].numpy()
            assert whole.id == own.id and np.array_equal(whole.structure_N, expected) and (expected == -1).sum() == 1
    batch = read.batch("train", 16, 7, torch.Generator().manual_seed(1))
    by_id = {each.id: each for each in read.chains("train")}
    for row, name in enumerate(batch.ids):
        starts = [
            start
            for start in range(len(by_id[name]))
            if np.array_equal(by_id[name].crop(start, 7).sequence, batch.sequence_BN[row])
        ]
        expected = by_id[name].crop(starts[0], 7).structure_N
        assert np.array_equal(np.where(batch.structure_mask_BN[row], batch.structure_BN[row], -1), expected)


def test_tokens_are_computed_once_and_vouched_for(lab, monkeypatch):
    pool, identity, corpus = lab
    first = as_read(corpus, objective(identity), pool)
    monkeypatch.setattr("stability.structure.tokens.structure_tokens", lambda *_: pytest.fail("computed again"))
    again = as_read(ProteinCorpus.load(pool / "cache" / corpus.fingerprint), objective(identity), pool)
    assert again.fingerprint == first.fingerprint != corpus.fingerprint
    assert first.format == {**corpus.format, "structure": 5 + 175} and first.description.endswith(
        f"structure tokens by {identity} (175 codes)"
    )
    tokens = np.concatenate([each.structure_N for each in first.chains("train")])
    counts = np.bincount(tokens[tokens >= 0], minlength=175) + 1
    assert np.allclose(first.log_frequencies()[30:].exp(), counts / counts.sum())
    copy = ProteinCorpus.load(pool / "cache" / corpus.fingerprint).with_structure(
        identity, 175, np.zeros(len(corpus.arrays["sequence"]), dtype=np.int64)
    )
    copy.save(pool / "cache" / copy.fingerprint)
    assert copy.fingerprint != first.fingerprint, "other tokens are other data"
    with open(pool / "cache" / copy.fingerprint / "structure.npy", "r+b") as stream:
        stream.seek(200)
        stream.write(b"\7")
    with pytest.raises(ValueError, match=r"structure.npy is missing or damaged \(it was altered\)"):
        load(pool / "cache", copy.fingerprint)


def test_a_tokenizer_that_is_not_there_is_refused_in_a_line_and_without_one_the_chains_are_read_as_they_are(lab):
    pool, identity, corpus = lab
    with pytest.raises(
        ValueError, match=rf"no structure tokenizer 0123456789ab in .* \(there: {identity}\); train one"
    ) as refused:
        as_read(corpus, objective("0123456789ab"), pool)
    assert len(str(refused.value).splitlines()) == 1
    assert as_read(corpus, objective(None), pool) is corpus


def test_the_tokenizer_is_part_of_what_a_run_is(lab):
    spec = run_spec(lab)
    other = spec.model_dump(mode="json")
    other["objective"]["tokenizer"] = "0123456789ab"
    assert run_id(validate(RunSpec, other)) != run_id(spec) != run_id(run_spec(lab, objective=objective(None)))


def test_a_run_left_and_resumed_equals_an_undisturbed_one_bit_for_bit_and_carries_its_components(lab, tmp_path):
    pool, _, _ = lab
    spec = run_spec(lab, objective=objective(lab[1], contexts=["ss", "domains", "orthologs"]), cross="auto")
    rows = []
    for leave_after in (None, 4):
        directory = RunDirectory(tmp_path / str(leave_after), run_id(spec))
        for _ in range(1 if leave_after is None else 2):
            steps: Any = train(spec, directory, cache_dir=pool / "cache", device="cpu")
            for number, _ in enumerate(steps, 1):
                if number == leave_after:
                    steps.close()
                    break
            leave_after = None
        result = directory.status()["result"]
        assert result["val_nll"] == pytest.approx(result["val_nll_sequence"] + result["val_nll_structure"], rel=1e-6)
        assert result["unigram_nll"] == pytest.approx(
            result["unigram_nll_sequence"] + result["unigram_nll_structure"], rel=1e-6
        )
        rows.append(list(read_jsonl(directory.metrics_file)))
    assert rows[0] == rows[1] and "val_nll_structure" in rows[0][-1]


def test_token_frequencies_reach_what_a_loop_over_the_masked_positions_says(lab):
    pool, identity, corpus = lab
    spec = run_spec(lab)
    read = load(pool / "cache", spec.data_fingerprint)
    goal = build_objective(spec, read.format)
    validation = Validation(spec, read, goal, torch.device("cpu"))
    counts = np.bincount(np.concatenate([each.sequence for each in read.chains("train")]), minlength=30)[5:] + 1
    nats = -np.log(counts / counts.sum())
    [examples] = validation._chunks
    means = []
    for row in range(len(examples.targets_BN)):
        own = [
            nats[examples.targets_BN[row, place, 0]]
            for place in range(20)
            if place < examples.targets_BN.shape[1] and examples.weights_BN[row, place, 0] > 0
        ]
        means.append(np.mean(own))
    assert validation.unigram_scores(read.log_frequencies())["unigram_nll_sequence"] == pytest.approx(
        np.mean(means), rel=1e-6
    )


@pytest.mark.parametrize("mechanism", ["sa", "sc"])
def test_alpha_max_of_a_checkpoint_is_exact(lab, tmp_path, mechanism):
    goal = objective(lab[1], contexts=["ss", "sasa", "domains", "descriptions"])
    spec = run_spec(lab, objective=goal, mechanism={"name": mechanism}, cross="auto", steps=3)
    directory = RunDirectory(tmp_path, run_id(spec))
    for _ in train(spec, directory, cache_dir=lab[0] / "cache", device="cpu"):
        pass
    curvature = validate(
        CurvatureSpec, {"warmup_batches": 2, "warmup_steps": 1, "recorded_steps": 2, "batch": 4, "microbatch": 2}
    )
    for _ in measure(directory, curvature, cache_dir=lab[0] / "cache", device="cpu"):
        pass
    table: Any = pd.read_parquet(directory.curvature_file("terminal"))
    assert len(table) == 2 * 2 and np.isfinite(table["curvature"]).all()
    assert_within(table["rel_error"].dropna().max(), 1e-2)
    assert set(table["method"]) == {"taylor"}


def test_batches_are_a_function_of_seed_and_step(lab):
    spec = run_spec(lab)
    read = load(lab[0] / "cache", spec.data_fingerprint)
    goal = build_objective(spec, read.format)
    one, two, other = (training_examples(spec, read, goal, "train", step, seed=0, batch=4) for step in (3, 3, 4))
    first, again, next_one = (each.inputs_BN.sources[1].tolist() for each in (one, two, other))
    assert first == again != next_one
