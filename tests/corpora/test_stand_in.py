"""What a dry run works on where the data would have to be downloaded."""

from __future__ import annotations

import pytest

from stability import sweep
from stability.config.parts import Part
from stability.config.parts import part as part_of
from stability.corpora.cache import prepare, prepare_for_plan
from stability.data import hf, stdlib
from tests.reading import read_spec


def part(**settings) -> Part:
    return part_of("data", {"name": "hf", **settings})


@pytest.fixture
def no_reading(monkeypatch):
    def refuse(*_args):
        raise AssertionError("a plan reads nothing")

    monkeypatch.setattr(hf, "_rows", refuse)
    monkeypatch.setattr(hf, "_check_reach", refuse)


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"tokenizer": "bytes"}, 256),
        ({"tokenizer": "gpt2"}, 50_257),
        ({"tokenizer": "gpt2", "keep": 4096}, 4097),
        ({"tokenizer": "nucleotides"}, 17),
    ],
)
def test_the_vocabulary_of_a_dataset_on_the_hub_is_known_without_reading_it(tmp_path, no_reading, settings, size):
    corpus, is_read = prepare_for_plan(part(dataset="Skylion007/openwebtext", **settings), tmp_path)
    assert (corpus.vocab_size, is_read) == (
        size,
        False,
    ) and corpus.train_tokens.max() == corpus.val_tokens.max() == size - 1
    assert "Skylion007/openwebtext, train, up to 10,000 rows" in corpus.description and not list(tmp_path.iterdir())


def test_a_folder_is_read_and_what_the_cache_has_is_taken_from_there(tmp_path, monkeypatch):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.jsonl").write_text("\n".join(f'{{"text": "line number {i} of the page"}}' for i in range(200)))
    assert prepare_for_plan(part(dataset=str(folder)), tmp_path / "cache")[1]
    on_hub = part(dataset="someone/something")
    rows = [{"text": f"line number {i} of the page"} for i in range(200)]
    monkeypatch.setattr(hf, "_rows", lambda config: iter(rows))
    made = prepare(on_hub, tmp_path / "cache")
    corpus, is_read = prepare_for_plan(on_hub, tmp_path / "cache")
    assert is_read and corpus.fingerprint == made.fingerprint


def test_the_standard_library_is_parsed_for_a_plan_only_in_a_pool_that_exists(tmp_path, monkeypatch):
    pool, library = tmp_path / "runs", part_of("data", {"name": "stdlib"})

    def refuse(_file):
        raise AssertionError("a plan in an empty folder parses nothing")

    with monkeypatch.context() as only_here:
        only_here.setattr(stdlib, "parse", refuse)
        corpus, is_read = prepare_for_plan(library, pool / "cache")
    assert (is_read, corpus.vocab_size, list(tmp_path.iterdir())) == (False, 256, [])
    pool.mkdir()
    found, is_read = prepare_for_plan(library, pool / "cache")
    assert is_read and found.vocab_size == corpus.vocab_size and found.fingerprint != corpus.fingerprint


@pytest.mark.parametrize(
    ("study", "words"),
    [
        (
            "text_54m",
            (
                "32 runs, 8 learning rates from 1e-05 to 0.005",
                "51,213,137",
                "50,257 tokens in the vocabulary",
                "83,886,080,000 tokens",
                "about 2.6e+19 operations",
                "30 days",
            ),
        ),
        (
            "dna_331m",
            (
                "10 runs, 5 learning rates from 7.5e-05 to 0.00075",
                "402,919,441",
                "17 tokens in the vocabulary",
                "26,214,400,000 tokens",
                "about 6.3e+19 operations",
                "73 days",
            ),
        ),
    ],
)
def test_a_dry_run_of_the_papers_protocol_needs_no_network(tmp_path, no_reading, capsys, monkeypatch, study, words):
    """5,000 steps of 512 sequences of 1,024 tokens, 32 and 10 times; where a step cannot be traced, as here, 6
    operations a parameter and token."""
    monkeypatch.setattr("sweeps.estimated.estimate_step", lambda *_: None)
    assert sweep.main([f"study={study}", "dry_run=true", f"runs_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in words) and "not prepared for a plan" in out and "finished" not in out


def test_every_preset_of_the_paper_has_its_batch_rates_and_objective():
    sizes = {
        "text_54m": 5000,
        "text_193m": 20_000,
        "text_385m": 20_000,
        "text_385m_mix": 20_000,
        "dna_51m": 5000,
        "dna_172m": 5000,
        "dna_331m": 5000,
    }
    for name, steps in sizes.items():
        spec = read_spec("sweep", [f"study={name}"])
        is_text = name.startswith("text")
        assert (spec.steps, spec.batch, spec.model.positions, spec.clip_norm) == (
            steps,
            512,
            1024,
            1.0,
        ) and 512 % spec.microbatch == 0
        assert (
            spec.objective.name == ("score_entropy" if is_text else "mlm")
            and spec.optimizer[0].settings.weight_decay == 1e-2
        )
        assert (
            spec.objective.settings.noise == "geometric"
            if is_text
            else spec.objective.settings.mask_rate == "betalinear30"
        )
        consensus = [each.settings for each in spec.mechanism if each.name == "sc"]
        assert all((each.window, each.rank, each.edge_hidden) == (2, 4, 256) for each in consensus)
