"""Plans for a GPU that is not here: the presets of the papers' sizes compose, and their dry runs tell parameters, hours
and memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from stability import sweep, train_tokenizer
from stability.config.identity import run_id
from stability.config.sweep import SweepSpec
from stability.config.tokenizer import TokenizerSpec
from stability.corpora.cache import prepare_for_plan
from stability.corpora.proteins import synthetic
from sweeps.estimated import GPUS, estimate_step
from tests.reading import read_spec
from tests.sizes import count_parameters

TEXT, DNA = 50_257, 17  # tokens
# layers, heads, width of the consensus paper's Table 10, and the parameters that it prints, in millions
TABLE_10 = {
    "text_54m": (6, 384, TEXT, 54), "text_193m": (12, 768, TEXT, 193), "text_385m": (32, 1024, TEXT, 385),
    "text_385m_mix": (32, 1024, TEXT, 385), "dna_51m": (6, 384, DNA, 51), "dna_172m": (12, 768, DNA, 172),
    "dna_331m": (32, 1024, DNA, 331), "ablation_consensus_193m": (12, 768, TEXT, 193),
}  # fmt: skip
RUNS = {
    "text_54m": 32, "text_193m": 36, "text_385m": 16, "text_385m_mix": 4, "dna_51m": 32, "dna_172m": 36, "dna_331m": 10,
    "protein_35m": 32, "protein_133m": 36, "protein_320m": 10, "ablation_consensus_193m": 90, "residuals": 12,
    "residuals_fineweb_edu": 12, "vit_small": 24, "vit_small_cifar100": 24, "attentionx_vit": 36, "attentionx_gpt": 24,
    "nanogpt": 9, "sedd": 12,
}  # fmt: skip
TABLE_9 = {  # "Model Size", in millions: value of the setting → size
    "edge_hidden": {4: 179, 16: 180, 64: 182, 256: 193},
    "rank": {1: 186, 4: 193, 8: 203, 16: 222},
    "window": {2: 193, 4: 193, 8: 193, 12: 193},
}


def points(preset, *words):
    spec = read_spec("sweep", [f"study={preset}", *words])
    corpus, is_read = prepare_for_plan(spec.data, Path("no cache"))
    assert not is_read
    first = {}
    for variant, run in spec.points(corpus.fingerprint):
        first.setdefault((run.mechanism.name, variant), run)
    return spec, corpus, first


def by_hand(preset, mechanism):
    """Embedding and head, two LayerNorms without biases and an MLP of four widths a layer, and a mixer: attention's four
    maps without biases; of consensus the values' and the outputs', and in each of d/64 heads the edge MLP, 2·64 → ξ → 1, 1
    and 64·r. Score entropy adds what the blocks are told of the noise: 256 → 128 → 128, and 6·d shifts, scales and gates a
    block."""
    layers, width, vocabulary, _ = TABLE_10[preset]
    edge = 256 * (2 * 64 + 1) + (256 + 1) * (2 + 4 * 64)
    mixers = {"sa": 4 * width**2, "sc": 2 * width**2 + width // 64 * edge}
    mixers["sw"] = mixers["sa"]
    mixers["mix"] = (mixers["sa"] + mixers["sc"]) // 2
    told = 0 if vocabulary == DNA else 256 * 128 + 128 + 128 * 129 + (6 * layers + 2) * width * 129
    block = 2 * width + 8 * width**2 + 5 * width + mixers[mechanism]
    return (vocabulary + 1) * width + layers * block + width + vocabulary * (width + 1) + told


@pytest.mark.parametrize("preset", [name for name in TABLE_10 if name != "ablation_consensus_193m"])
def test_parameters_are_those_that_the_papers_sizes_add_up_to(preset):
    spec, corpus, kinds = points(preset)
    assert len(spec.points(corpus.fingerprint)) == RUNS[preset]
    for (mechanism, _), run in kinds.items():
        assert count_parameters(run, corpus.format) == by_hand(preset, mechanism)


def test_the_ablation_at_193m_has_the_sizes_of_table_9_but_for_one_constant():
    """23.3 million, which the paper's own sizes do not account for, give or take the rounding of its millions."""
    _, corpus, kinds = points("ablation_consensus_193m")
    assert len(kinds) == 10
    offsets = []
    for (_, variant), run in kinds.items():
        setting, _, value = (variant or "edge_hidden=256").partition("=")
        offsets.append(TABLE_9[setting][int(value)] - count_parameters(run, corpus.format) / 1e6)
    assert max(offsets) - min(offsets) <= 1.0 and min(offsets) > 22.8
    assert count_parameters(kinds["sc", ""], corpus.format) == by_hand("ablation_consensus_193m", "sc")


def test_a_hundred_classes_are_ninety_more_outputs():
    """9,622,512 are those of the repository's own model with ten (conf/model/vit_small_spt.yaml)."""
    for preset, expected in (("vit_small", 9_622_512), ("vit_small_cifar100", 9_622_512 + 90 * (512 + 1))):
        _, corpus, kinds = points(preset, "mechanism=[sa]")
        assert [count_parameters(run, corpus.format) for run in kinds.values()] == [expected]
        assert all(run.objective.settings.rand_augment == 2 for run in kinds.values())


@pytest.mark.parametrize(("preset", "table"), [("dna_331m", "Table 3"), ("protein_320m", "Table 4")])
def test_the_largest_presets_have_the_rates_of_table_11_and_of_the_table_that_prints_their_results(preset, table):
    words = [f"study={preset}", *(["objective.tokenizer=0123456789ab"] if "protein" in preset else [])]
    spec, ticked = read_spec("sweep", words), read_spec("sweep", [*words, "lr=paper_large"])
    assert set(spec.lr.rates()) == {7.5e-5, 1e-4, 2.5e-4, 5e-4} | {1e-4, 2.5e-4, 5e-4, 7.5e-4}
    ids = [{run_id(run) for run in each.expand("f" * 64)} for each in (spec, ticked)]
    assert ids[1] < ids[0], "the runs of Table 11 are the same ones"


@pytest.mark.parametrize("preset", ["text_54m", "text_193m", "text_385m", "text_385m_mix", "ablation_consensus_193m"])
def test_presets_of_text_are_scored_by_gpt_2_large(preset):
    generate = read_spec("sweep", [f"study={preset}"]).generate
    assert (generate.num, generate.oracle) == (1000, "hf:gpt2-large")


def test_presets_of_dna_and_proteins_name_their_oracles_and_how_many_samples():
    for size in ("51m", "172m", "331m"):
        generate = read_spec("sweep", [f"study=dna_{size}"]).generate
        assert (generate.num, generate.oracle) == (1000, "evo2:evo2_1b_base")
    for size in ("35m", "133m", "320m"):
        generate = read_spec("sweep", [f"study=protein_{size}", "objective.tokenizer=0123456789ab"]).generate
        assert (generate.num, generate.oracle) == (1000, "hf:facebook/esm2_t33_650M_UR50D")


def test_fineweb_edu_differs_from_openwebtext_in_nothing_but_the_data():
    owt, fineweb = (read_spec("sweep", [f"study={name}"]) for name in ("residuals", "residuals_fineweb_edu"))
    settings = fineweb.data.settings
    assert (settings.dataset, settings.subset, settings.revision, settings.field) == (
        "HuggingFaceFW/fineweb-edu", "sample-10BT", None, "text",
    )  # fmt: skip
    same = {"data": owt.data, "name": owt.name}
    assert fineweb.model_copy(update=same) == owt


def test_gpus_that_a_plan_may_name_are_those_that_are_known():
    for spec in (SweepSpec, TokenizerSpec):
        named = {name for item in (spec.model_fields["plan_gpu"].annotation,) for name in _names(item)}
        assert named == set(GPUS)


def _names(annotation):
    return [
        name
        for item in get_args(annotation)
        for name in (_names(item) if get_args(item) else [item])
        if isinstance(name, str)
    ]


def planned(capsys, *words):
    """What a dry run prints, and of each kind of run (parameters, hours, GB)."""
    assert sweep.main([*words, "dry_run=true"]) == 0
    out = capsys.readouterr().out
    rows = re.findall(r"^(\S+/\S+.*?)\s+\d+\s+\d+\s+([\d,]+)\s+\S+\s+\S+\s+\d+ms\s+([\d.]+)h\s+([\d.]+)GB$", out, re.M)
    return out, {row[0]: (int(row[1].replace(",", "")), float(row[2]), float(row[3])) for row in rows}


def test_a_dry_run_at_the_papers_size_tells_hours_and_memory_on_an_h100_without_one(tmp_path, capsys):
    out, rows = planned(capsys, "study=dna_51m", "mechanism=[sa]", f"runs_dir={tmp_path}")
    parameters, hours, memory = rows["sa/identity/layernorm/adamw"]
    assert parameters == by_hand("dna_51m", "sa")
    # of each position 6 operations a weight but the embedding's, and of attention 7 products in place of 6
    operations = 5000 * 512 * 1024 * (6 * (parameters - 18 * 384) + 14 * 6 * 1024 * 384)
    assert operations / 67e12 / 3600 < hours < 3 * operations / 67e12 / 3600
    # 20 bytes a parameter, and at least six tensors of the width and the MLP's two of four widths a layer, once
    assert 20 * parameters + 6 * 14 * 4 * 32 * 1024 * 384 < memory * 1e9 < 48e9
    assert "on one H100 SXM" in out and "80 GB, 3.35 TB/s, 67 TFLOP/s in float32" in out
    assert "α_max, samples (not their oracle) included; nothing was trained" in out


def test_a_slower_card_takes_longer_and_a_smaller_one_may_have_no_room(tmp_path, capsys):
    words = ["study=dna_51m", "mechanism=[sa]", "lr=1e-3", f"runs_dir={tmp_path}", "batch=1024", "microbatch=512"]
    hours = {}
    for name in ("a40", "h200"):
        out, rows = planned(capsys, *words, f"plan_gpu={name}")
        (_, hours[name], memory), capacity = rows["sa/identity/layernorm/adamw"], GPUS[name].memory / 1e9
        assert (f"no room in {capacity:.0f} GB" in out) == (memory > capacity)
        assert "plangpu" not in out.partition(":")[0].replace("_", ""), (
            "what a plan is for is no part of a study's name"
        )
    assert hours["a40"] > hours["h200"] and memory > 48


def test_a_plan_in_bfloat16_has_hours_and_memory_and_names_its_peak(tmp_path, capsys):
    words = ["study=residuals", "model.layers=2", "residual=[identity]", "primary=null", f"runs_dir={tmp_path}"]
    (out, narrow), (_, wide) = (planned(capsys, *words, f"precision={each}") for each in ("bf16", "float32"))
    (kind,) = narrow
    parameters, hours, memory = narrow[kind]
    assert wide[kind][0] == parameters and 0 < hours < wide[kind][1] and 0 < memory < wide[kind][2]
    assert "67 TFLOP/s in float32, 989 in bf16)" in out and "of no kind that can be estimated" not in out


def test_microbatches_take_their_number_of_times_as_long_and_less_memory(tmp_path):
    _, corpus, kinds = points("dna_51m", "mechanism=[sa]")
    run = kinds["sa", ""]
    gpu = GPUS["h100"]
    whole, parts = (
        estimate_step(run.model_copy(update={"batch": 16, "microbatch": rows}), corpus, gpu) for rows in (None, 4)
    )
    assert parts[0] == pytest.approx(whole[0], rel=0.1) and parts[1] < 0.5 * whole[1]


def test_what_cannot_be_estimated_says_nothing_rather_than_something():
    _, corpus, kinds = points("dna_51m", "mechanism=[sa]", "optimizer=[shampoo]", "hessian=false")
    assert estimate_step(kinds["sa", ""], corpus, GPUS["h100"]) is None
    _, corpus, kinds = points("dna_51m", "mechanism=[sa]", "compile=true")
    assert estimate_step(kinds["sa", ""], corpus, GPUS["h100"]) is None


def test_a_plan_of_proteins_needs_neither_tokenizer_nor_structures(tmp_path, capsys, monkeypatch):
    pytest.importorskip("biotite", reason="biotite, of the extra protein, is not installed")
    monkeypatch.setattr(synthetic, "NUM_CHAINS", 12)
    words = ["study=protein_35m", "mechanism=[sa]", "model.layers=1", "lr=1e-3", f"runs_dir={tmp_path}"]
    out, rows = planned(capsys, *words)
    assert "a tokenizer to be trained (4,375 codes)" in out and len(rows) == 1
    assert not list(tmp_path.glob("tokenizers/*"))
    with pytest.raises(ValueError, match="structure among objective.sources needs objective.tokenizer=ID"):
        sweep.main(words)


def test_the_papers_tokenizer_composes_and_its_dry_run_tells_what_it_costs(capsys):
    spec = read_spec("train_tokenizer", ["size=paper"])
    sizes = [(each.layers, each.width, each.heads) for each in (spec.encoder, spec.atom_decoder)]
    assert sizes == [(16, 256, 4), (36, 512, 8)] and spec.frame == "raw"
    words = ["size=paper", "dry_run=true", "encoder.layers=1", "decoder.layers=1", "atom_decoder.layers=1"]
    assert train_tokenizer.main([*words, "positions=32", "plan_gpu=a40"]) == 0
    out = capsys.readouterr().out
    counts = {
        name: int(number.replace(",", "")) for name, number in re.findall(r"^(\w+) +([\d,]+) parameters$", out, re.M)
    }
    assert set(counts) == {"encoder", "decoder", "atom_decoder"}
    total = int(re.search(r"tokenizer, ([\d,]+) parameters, 4,375 codes", out).group(1).replace(",", ""))
    assert total == sum(counts.values()) and counts["atom_decoder"] > 12 * 512**2
    assert len(re.findall(r"^stage [12] .* at least [\d,]+ ms each, .*, [\d.]+ GB$", out, re.M)) == 2 and "A40" in out


@pytest.mark.slow
@pytest.mark.parametrize("preset", RUNS)
def test_every_preset_of_a_papers_size_has_a_dry_run_with_hours_and_memory_that_an_h100_has(preset, tmp_path, capsys):
    out, rows = planned(capsys, f"study={preset}", f"runs_dir={tmp_path}")
    assert f": {RUNS[preset]} runs" in out and rows and "--h" not in out
    kinds = int(re.search(r"(\d+) runs", out).group(1))
    assert 0 < len(rows) <= kinds
    for parameters, hours, memory in rows.values():
        assert parameters > 1e6 and hours > 0 and 0 < memory < 80
