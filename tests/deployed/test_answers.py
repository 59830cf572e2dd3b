"""Answers of deployed models: NLLs, continuations, filled masks and classes, each against the trained model itself."""

from __future__ import annotations

import io
import json
import math
import os
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from stability.config.base import validate
from stability.config.deployment import InferSpec
from stability.corpora.proteins.alphabets import LETTERS
from stability.corpora.tokens.augmentation import CODES
from stability.corpora.tokens.gpt2 import Gpt2Tokenizer
from stability.deployed import benchmark, load
from stability.deployed.answers import Answerer
from stability.deployed.tokens import Tokens
from stability.models import SPECIALS
from stability.probes.generation.samplers import keep_likeliest
from stability.training import checkpoint
from tests.conftest import Lab
from tests.data.sources import ranks
from tests.objectives.test_recall import recall_spec
from tests.probes.proteins import ProteinLab

CPU = torch.device("cpu")
TEXT = "the window of a stable step is wide"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def runs(lab):
    fasta = lab.text.with_name("made.fasta")
    letters = "".join(np.random.default_rng(0).choice(list("ACGT"), 6000))
    fasta.write_text(f">a\n{letters[:3000]}\n>b\n{letters[3000:]}\n")
    dna = {"name": "dna", "path": str(fasta), "hold_out": "region"}
    return {
        "ar": lab.train(lab.spec(lr_peak=0.03, objective={"name": "ar"})),
        "mlm": lab.train(lab.spec(lr_peak=0.03)),
        "score_entropy": lab.train(lab.spec(lr_peak=0.01, objective={"name": "score_entropy"})),
        "dna": lab.train(lab.spec(lr_peak=0.03, data=dna)),
        "dna_ar": lab.train(lab.spec(lr_peak=0.03, data=dna, objective={"name": "ar"})),
    }


@pytest.fixture
def placed(tmp_path, entered):
    """Deploy a run in fp32 and return its folder."""

    def place(run):
        out = tmp_path / run.run_id
        done = entered("stability.deploy", f"ckpt={run.path}", "format=fp32", f"out={out}", "overwrite=true")
        assert done.returncode == 0, done.stderr
        return out

    return place


def answerer(folder, **changes):
    spec = validate(InferSpec, {"dir": str(folder), "text": "x", "device": "cpu", **changes})
    return Answerer(load(folder), spec, CPU)


def test_a_text_s_nll_is_that_of_a_loop_over_its_pieces(runs, placed):
    _, model = checkpoint.load(runs["ar"].checkpoints()[-1])
    answer = answerer(placed(runs["ar"]), tokens=0).answer(TEXT, 0)
    tokens, positions, nats = list(TEXT.encode()), 16, []
    for start in range(0, len(tokens) - 1, positions):
        piece = tokens[start : start + positions + 1]
        with torch.no_grad():
            logits = model(torch.tensor([piece[:-1]]))[0].double()
        nats += [
            math.log(sum(map(math.exp, row.tolist()))) - row[token].item()
            for row, token in zip(logits, piece[1:], strict=True)
        ]
    assert len(nats) == answer["tokens"] == len(tokens) - 1
    assert answer["nll"] == pytest.approx(math.fsum(nats) / len(nats), rel=1e-5)
    assert "continuations" not in answer


def test_temperature_0_takes_the_likeliest_of_the_last_positions_each_time(runs, placed):
    _, model = checkpoint.load(runs["ar"].checkpoints()[-1])
    found = answerer(placed(runs["ar"]), tokens=20, temperature=0).answer(TEXT, 0)["continuations"][0]
    tokens = list(TEXT.encode())
    for _ in range(20):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens[-16:]]))[0, -1].argmax()))
    assert found == bytes(tokens[len(TEXT) :]).decode("utf-8", "replace")


def test_continuations_are_a_function_of_the_seed(runs, placed):
    folder = placed(runs["ar"])
    first, again, other = (
        answerer(folder, num=3, tokens=12, seed=seed).answer(TEXT, 0)["continuations"] for seed in (0, 0, 1)
    )
    assert first == again != other and len(set(first)) == 3


def test_top_p_keeps_the_fewest_tokens_that_reach_the_share():
    weights = torch.tensor([[0.1, 0.5, 0.15, 0.25], [0.25, 0.25, 0.25, 0.25]])
    assert keep_likeliest(weights, 0.7).tolist() == [[0.0, 0.5, 0.0, 0.25], [0.25, 0.25, 0.25, 0.0]]
    assert keep_likeliest(weights, 0.5)[0].tolist() == [0.0, 0.5, 0.0, 0.0]
    assert torch.equal(keep_likeliest(weights, 1.0), weights)


@pytest.mark.parametrize("name", ["mlm", "score_entropy"])
def test_masks_are_filled_from_the_model_s_own_probabilities(runs, placed, name):
    found = answerer(placed(runs[name]), top=3)
    answer = found.answer("the w[MASK]ndow of", 0)
    tokens = torch.tensor([[*b"the w", found.objective.mask_id, *b"ndow of"]])
    probs = found.objective.clean_probs(checkpoint.load(runs[name].checkpoints()[-1])[1], tokens)[0, 5]
    values, places = probs.topk(3)
    (mask,) = answer["masks"]
    assert mask["token"] == 5
    # a byte beyond ASCII alone is no text
    assert [token for token, _ in mask["top"]] == [
        bytes([place]).decode("utf-8", "replace") for place in places.tolist()
    ]
    assert [value for _, value in mask["top"]] == pytest.approx(values.tolist(), rel=1e-5)
    assert answer["filled"] == f"the w{mask['top'][0][0]}ndow of"


def test_a_long_text_is_filled_piece_by_piece(runs, placed):
    text = "the window of a [MASK]table step is wi[MASK]e where"
    answer = answerer(placed(runs["mlm"])).answer(text, 0)
    assert len(answer["masks"]) == 2 and len(answer["filled"]) == len(text.replace("[MASK]", "?"))
    assert [mask["token"] for mask in answer["masks"]] == [16, 33]


def test_dna_is_filled_and_continued_by_its_letters(runs, placed):
    answer = answerer(placed(runs["dna"])).answer("acgt_cgta_", 0)
    assert len(answer["filled"]) == 10 and set(answer["filled"]) <= set(CODES)
    assert answer["filled"].startswith("ACGT") and [mask["token"] for mask in answer["masks"]] == [4, 9]
    continued = answerer(placed(runs["dna_ar"]), tokens=9).answer("ACGT", 0)
    assert continued["tokens"] == 3 and set(continued["continuations"][0]) <= set(CODES)
    with pytest.raises(ValueError, match="character 3 is 'x', which is no nucleotide"):
        answerer(placed(runs["dna_ar"])).answer("ACx", 0)


def test_residues_are_filled_without_structure_and_contexts(tmp_path_factory, placed):
    proteins = ProteinLab(tmp_path_factory.mktemp("proteins"))
    for sources, contexts in ((("sequence",), ("ss", "descriptions")), (("sequence", "structure"), ())):
        folder = placed(proteins.train(proteins.spec(sources, contexts)))
        answer = answerer(folder, top=2).answer("MK_LVWA_", 0)
        assert len(answer["filled"]) == 8 and answer["filled"][:2] == "MK" and answer["filled"][3:7] == "LVWA"
        assert set(answer["filled"]) <= set(LETTERS)
        assert [mask["token"] for mask in answer["masks"]] == [2, 7]
        long = answerer(folder).answer("MKL_" * 8, 0)  # 18 residues at a time
        assert len(long["filled"]) == 32 and len(long["masks"]) == 8
    with pytest.raises(ValueError, match="which is no amino acid"):
        answerer(folder).answer("MK1_", 0)
    assert len(SPECIALS) == 5


def test_an_image_s_class_is_the_trained_model_s(lab, placed, tmp_path, entered):
    rng = np.random.default_rng(0)
    labels = np.arange(240) % 3
    pixels = np.clip(100 + 40 * labels[:, None, None, None] + rng.normal(0, 20, (240, 8, 8, 3)), 0, 255)
    np.savez(tmp_path / "made.npz", x=pixels.astype(np.uint8), y=labels, classes=np.array(["dark", "grey", "light"]))
    run = lab.train(
        lab.spec(
            objective={"name": "classify", "crop": 1},
            data={"name": "images", "path": str(tmp_path / "made.npz"), "hold_out": 0.2},
            steps=60,
            lr_peak=1e-2,
        )
    )
    folder = placed(run)
    for value, name in ((100, "dark"), (180, "light")):
        Image.new("RGB", (8, 8), (value,) * 3).save(tmp_path / f"{name}.png")
        done = entered("stability.infer", f"dir={folder}", f"text={tmp_path / name}.png")
        assert done.returncode == 0 and done.stdout.startswith(f"{name} 0."), done.stdout + done.stderr
    Image.new("RGB", (9, 8)).save(tmp_path / "wide.png")
    with pytest.raises(ValueError, match="8×9 pixels; the model reads 8×8"):
        answerer(folder).answer(str(tmp_path / "wide.png"), 0)


def test_byte_pairs_are_encoded_without_the_rank_files(tmp_path):
    tokenizer = Gpt2Tokenizer(ranks(tmp_path, "pairs", [("a", "b"), ("ab", "c")]))
    kept = Tokens.of_json(Tokens("text", tokenizer.vocabulary, tokenizer.to_json()).to_json())
    for text in ("abc ab", "naïve – 日本 🐍\n", ""):
        assert kept.encode(text).tolist() == tokenizer.encode(text).tolist()
        assert kept.decode(kept.encode(text)) == text


def test_files_and_json_lines_are_answered_in_order(runs, placed, tmp_path, entered, monkeypatch):
    folder = placed(runs["mlm"])
    rows = [{"text": f"the w[MASK]ndow {number}"} for number in range(3)]
    (tmp_path / "in.jsonl").write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    words = (f"dir={folder}", f"input={tmp_path / 'in.jsonl'}")
    done = entered("stability.infer", *words, f"output={tmp_path / 'out.jsonl'}")
    assert done.returncode == 0 and "answers: 3" in done.stdout
    written = (tmp_path / "out.jsonl").read_text()
    assert [json.loads(line)["text"] for line in written.splitlines()] == [row["text"] for row in rows]
    assert entered("stability.infer", *words).stdout == written
    monkeypatch.setattr("sys.stdin", io.StringIO((tmp_path / "in.jsonl").read_text()))
    assert entered("stability.infer", f"dir={folder}", "input=-").stdout == written
    (tmp_path / "in.txt").write_text("".join(f"{row['text']}\n" for row in rows))
    assert entered("stability.infer", f"dir={folder}", f"input={tmp_path / 'in.txt'}").stdout == written


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2 is no JSON (Expecting property name enclosed in double quotes, column 2)"),
        ('{"txt": "a"}', 'line 2 must be an object with a text under "text"'),
        ('{"text": "no mask"}', "line 2: the text holds no [MASK]"),
    ],
)
def test_a_bad_line_is_named_and_no_output_is_written(runs, placed, tmp_path, entered, line, told):
    (tmp_path / "in.jsonl").write_text(f'{{"text": "a[MASK]"}}\n{line}\n')
    words = (f"input={tmp_path / 'in.jsonl'}", f"output={tmp_path / 'out.jsonl'}")
    done = entered("stability.infer", f"dir={placed(runs['mlm'])}", *words)
    assert done.returncode == 2 and told in done.stderr and not (tmp_path / "out.jsonl").exists()


def test_an_empty_input_is_refused_and_no_output_is_written(runs, placed, tmp_path, entered, monkeypatch):
    for name, text in (("in.jsonl", "\n\n"), ("in.txt", "")):
        (tmp_path / name).write_text(text)
        words = (f"input={tmp_path / name}", f"output={tmp_path / 'out.jsonl'}")
        done = entered("stability.infer", f"dir={placed(runs['mlm'])}", *words)
        assert done.returncode == 2 and done.stderr == f"error: {tmp_path / name} is empty; give a text in each line\n"
        assert not (tmp_path / "out.jsonl").exists()
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    done = entered("stability.infer", f"dir={placed(runs['mlm'])}", "input=-")
    assert done.returncode == 2 and "the standard input is empty" in done.stderr and not done.stdout


def test_a_line_that_is_not_utf_8_is_named_whatever_the_terminal_s_encoding(
    runs, placed, tmp_path, entered, monkeypatch
):
    folder, line = placed(runs["ar"]), b'{"text": "a"}\n'
    (tmp_path / "in.jsonl").write_bytes(line * 999 + b'{"text": "\xff"}\n')
    done = entered("stability.infer", f"dir={folder}", f"input={tmp_path / 'in.jsonl'}", "tokens=0", "output=out")
    assert (
        done.returncode == 2 and done.stderr == f"error: {tmp_path / 'in.jsonl'}, line 1000 is not UTF-8; convert it\n"
    )
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(line + b"\xff\n"), encoding="ascii"))
    done = entered("stability.infer", f"dir={folder}", "input=-", "tokens=0")
    assert done.returncode == 2 and done.stderr == "error: the standard input, line 2 is not UTF-8; convert it\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\nab\n"), encoding="utf-8"))
    done = entered("stability.infer", f"dir={folder}", "interactive=true", "tokens=0")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and "character 1 of the text has no UTF-8 form" in lines[0] and "NLL" in lines[1]


def test_a_byte_order_mark_is_no_part_of_the_first_text(runs, placed, tmp_path, entered):
    (tmp_path / "in.jsonl").write_text('{"text": "ab"}\n', encoding="utf-8-sig")
    (tmp_path / "in.txt").write_text("ab\n", encoding="utf-8-sig")
    for name in ("in.jsonl", "in.txt"):
        done = entered("stability.infer", f"dir={placed(runs['ar'])}", f"input={tmp_path / name}", "tokens=0")
        assert done.returncode == 0 and json.loads(done.stdout)["text"] == "ab", name


def test_answers_to_the_standard_input_are_written_to_output(runs, placed, tmp_path, entered, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('{"text": "ab"}\n'))
    words = ("input=-", f"output={tmp_path / 'out.jsonl'}", "tokens=0")
    done = entered("stability.infer", f"dir={placed(runs['ar'])}", *words)
    assert done.returncode == 0 and done.stdout == f"answers: 1 in {tmp_path / 'out.jsonl'}\n"
    assert json.loads((tmp_path / "out.jsonl").read_text())["text"] == "ab"


def test_a_closed_standard_input_is_refused(tmp_path, entered, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    for word in ("input=-", "interactive=true"):
        done = entered("stability.infer", f"dir={tmp_path}", word)
        assert done.returncode == 2
        assert done.stderr == "error: the standard input is closed; give text=… or input=FILE\n"


def test_no_output_replaces_texts_the_model_a_link_or_a_folder(runs, placed, tmp_path, entered):
    folder, texts = placed(runs["ar"]), tmp_path / "in.txt"
    texts.write_text("ab\n")
    (tmp_path / "link").symlink_to(tmp_path / "device")
    (tmp_path / "own").mkdir()
    for output, told in (
        (texts, "is a file of the input; give another one"),
        (tmp_path / "own" / ".." / "in.txt", "is a file of the input"),
        (folder / "model.safetensors", "is a file of the deployed model; give another one"),
        (tmp_path / "link", "is no plain file; give a file's name, or leave it out for standard output"),
        (tmp_path / "own", "is no plain file"),
    ):
        before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
        done = entered("stability.infer", f"dir={folder}", f"input={texts}", f"output={output}", "tokens=0")
        assert done.returncode == 2 and done.stderr.startswith(f"error: output={output}: {told}"), done.stderr
        assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
        assert (tmp_path / "link").is_symlink()


def test_a_named_pipe_is_read(runs, placed, tmp_path, entered):
    folder, pipe = placed(runs["ar"]), tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("ab\n",), daemon=True)
    writer.start()
    done = entered("stability.infer", f"dir={folder}", f"input={pipe}", "tokens=0")
    assert done.returncode == 0 and json.loads(done.stdout)["text"] == "ab"


def test_a_conversation_goes_on_after_a_mistake(runs, placed, entered, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("no mask\na[MASK]c\n"))
    done = entered("stability.infer", f"dir={placed(runs['mlm'])}", "interactive=true")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0].startswith("error: the text holds no [MASK]") and "token 2:" in lines[2]


def test_benchmark_measures_each_folder_at_both_batch_sizes(runs, placed, entered):
    folder = placed(runs["ar"])
    done = entered("stability.infer", f"dir=[{folder},{folder}]", "benchmark=true", "repeats=1", "device=cpu")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert [line.count("batch 1:") for line in lines] == [1, 0, 1, 0]
    assert [line.count("batch 32:") for line in lines] == [0, 1, 0, 1] and all(
        "tokens/s (" in line and "), peak" in line for line in lines
    )


def test_benchmark_prints_the_median_beside_the_slowest_and_the_fastest_repeat(runs, placed, entered, monkeypatch):
    asked = []
    monkeypatch.setattr(benchmark, "time_repeats", lambda call, repeats: asked.append(repeats) or [0.02, 0.08, 0.04])
    done = entered("stability.infer", f"dir={placed(runs['ar'])}", "benchmark=true", "repeats=3", "device=cpu")
    positions = load(placed(runs["ar"])).spec.model.positions
    told = f"{positions / 0.04:,.0f} tokens/s ({positions / 0.08:,.0f} to {positions / 0.02:,.0f}), peak "
    assert f"batch 1: {told}" in done.stdout and asked == [3, 3]


def test_a_benchmark_without_examples_of_the_objective_is_refused_in_a_line(lab, placed, entered):
    folder = placed(lab.train(recall_spec(lab, steps=4)))
    done = entered("stability.infer", f"dir={folder}", "benchmark=true", "repeats=1", "device=cpu")
    assert done.returncode == 2
    assert done.stderr == "error: benchmark=true makes no examples for objective=recall\n"


def test_the_next_command_of_a_deployed_model_is_one_that_answers(lab, runs, tmp_path, entered):
    pairs = {"name": "synthetic_pairs", "num": 100, "form": "pairs"}
    sentences = lab.train(lab.spec(objective={"name": "sentence_pairs", "loss": "triplet"}, data=pairs))
    for run, told in (
        (runs["mlm"], "next: python -m stability.infer dir={out} text='…'"),
        (
            lab.train(recall_spec(lab, steps=4)),
            "next: stability.deployed.load('{out}') in Python; infer answers for no",
        ),
        (sentences, "sentence embeddings: python -m stability.embed mode=export ckpt={ckpt} out=…"),
    ):
        out = tmp_path / f"{run.run_id}_told"
        done = entered("stability.deploy", f"ckpt={run.path}", "format=fp32", f"out={out}")
        assert done.returncode == 0, done.stderr
        said = done.stdout[done.stdout.index("next: ") :]
        assert told.format(out=out, ckpt=run.path) in said
        is_answered = entered("stability.infer", f"dir={out}", "text=a[MASK]c").returncode == 0
        assert is_answered == ("stability.infer" in said)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give one of text=…, input=FILE, interactive=true and benchmark=true; none is given"),
        (["text=a", "benchmark=true"], "text and benchmark are given"),
        (["text=a", "output=x"], "output=x belongs to input=FILE"),
        (["input=nothing.txt"], "input=nothing.txt: no such file"),
        (["text=a", "top_p=0"], "top_p=0"),
        (["text=a", "num=10000000000"], "num=10000000000: input should be less than or equal to 4096"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(tmp_path, entered, words, told):
    done = entered("stability.infer", f"dir={tmp_path}", *words)
    assert done.returncode == 2 and told in done.stderr


def test_a_folder_that_is_none_is_named(tmp_path, entered):
    done = entered("stability.infer", f"dir={tmp_path}", "text=a")
    assert done.returncode == 2 and f"no deployed model in {tmp_path}" in done.stderr
