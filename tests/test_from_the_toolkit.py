"""docs/from_the_toolkit.md has every field of the toolkit's schema, and its words are words of ours."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.reading import read_spec, replaced

PAGE = Path(__file__).resolve().parents[1] / "docs" / "from_the_toolkit.md"
# fields as *Frankenstein Transformer* prints them, by the page's heading: sections 4.3, 4.5 and 4.6; its section 4.1
# writes sparge_attn for 4.3's sparse_attn
GROUPS = ("embeddings", "norms", "ode", "retnet", "mamba", "attention", "other")
FIELDS = {
    "Model": """
        model_class model.mode vocab_size hidden_size num_layers num_loops num_heads retention_heads num_experts
        top_k_experts dropout layer_pattern ode_solver ode_steps use_bitnet norm_type use_factorized_embedding
        factorized_embedding_dim use_embedding_conv embedding_conv_kernel hope_base hope_damping use_hope use_moe
        ffn_hidden_size ffn_activation
    """,
    "Blocks of a pattern": """
        retnet retnet_attn mamba ode titan_attn standard_attn sigmoid_attn sparse_transformer_attn longformer_attn
        bigbird_attn sparsek_attn nsa_attn sparge_attn sparse_attn fasa_attn gla_attn deltanet_attn gated_deltanet_attn
        hgrn2_attn fox_attn gated_softmax_attn
    """,
    "Training": """
        batch_size dataloader_workers max_length task mlm_probability max_samples dataset_batch_size num_workers
        cache_dir local_parquet_dir prefer_local_cache stream_local_parquet use_amp gradient_accumulation_steps
        optimizer optimizer_class parameters scheduler_total_steps scheduler_warmup_ratio scheduler_type grad_clip_max_norm
        inf_post_clip_threshold max_nan_retries checkpoint_every_n_steps max_rolling_checkpoints num_best_checkpoints
        nan_check_interval log_gradient_stats gradient_log_interval csv_log_path csv_rotate_on_schema_change
        gpu_metrics_backend nvml_device_index enable_block_grad_norms telemetry_log_interval use_galore galore_rank
        galore_update_interval galore_scale galore_max_dim
    """,
    "Optimizers": """
        sgd_momentum adamw adafactor galore_adamw prodigy lion sophia muon turbo_muon radam adan adopt ademamix
        mars_adamw cautious_adamw lamb schedulefree_adamw shampoo soap momentum nesterov beta2_decay clip_threshold
        eps1 eps2 rank update_proj_gap d_coef rho update_k ns_steps ns_eps cautious_clip
    """
    + " ".join(f"{kind}_{group}" for kind in ("lr", "wd", "betas", "eps") for group in GROUPS),
}
QUOTED = re.compile(r"`([^`]+)`")


def rows() -> list[tuple[str, list[str], str, str]]:
    """(heading, fields, words, remarks) of each row of the page's tables."""
    found, heading = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("| `"):
            fields, words, remarks = (cell.strip() for cell in line.strip("|").split("|"))
            found.append((heading, QUOTED.findall(fields), words, remarks))
    return found


LINES = sorted({line for _, _, words, _ in rows() for line in QUOTED.findall(words)})
# in remarks, behind a row's first line
FURTHER = sorted(
    {
        (" ".join(QUOTED.findall(words)[:1]), more)
        for _, _, words, remarks in rows()
        for more in QUOTED.findall(remarks)
        if "=" in more and not more.startswith("what=")  # a probe's
    }
)


def test_the_page_has_every_field_that_the_paper_prints_and_no_other():
    listed: dict[str, list[str]] = {heading: [] for heading in FIELDS}
    for heading, fields, _, _ in rows():
        listed[heading] += fields
    assert {heading: sorted(fields) for heading, fields in listed.items()} == {
        heading: sorted(fields.split()) for heading, fields in FIELDS.items()
    }


def test_every_field_has_words_of_ours_or_a_deviation_with_its_reason():
    assert [fields for _, fields, words, _ in rows() if not QUOTED.findall(words) and words != "–"] == []
    assert [
        fields
        for _, fields, words, remarks in rows()
        if words == "–" and not re.match(r"\*\*Deviation\*\*: \w", remarks)
    ] == []


@pytest.mark.parametrize("line", LINES)
def test_its_words_are_words_of_the_command_line(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_folder").mkdir()
    (tmp_path / "FILE").write_text("text")
    assert read_spec("sweep", shlex.split(line)).kinds()


@pytest.mark.parametrize(("line", "more"), FURTHER)
def test_the_words_of_its_remarks_are_words_of_the_command_line(line, more):
    assert read_spec("sweep", replaced(shlex.split(line), *shlex.split(more))).kinds()


@pytest.mark.parametrize("word", ["num_experts=8", "model.num_layers=2", "ffn.num_experts=2"])
def test_the_toolkit_s_own_names_are_refused(word):
    with pytest.raises(ValueError):
        read_spec("sweep", [word])
