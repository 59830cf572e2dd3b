"""``python -m stability.embed mode=… ckpt=…``: embed sentences; compare, search and cluster them; export the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability.cli.entry import check_writable, run_entry
from stability.cli.subjects import read_about
from stability.cli.words import Invocation
from stability.config.deployment import EmbedSpec
from stability.config.parts import Part
from stability.printable import print_text, visible
from stability.registry import Registry

if TYPE_CHECKING:
    import numpy as np

    from stability.sentences.encoder import Encoder, LibraryEncoder

HELP = """
python -m stability.embed mode=encode ckpt=RUN input=FILE out=FOLDER
python -m stability.embed mode=similarity ckpt=RUN query=TEXT text=TEXT
python -m stability.embed mode=search ckpt=RUN query=TEXT data=stdlib_pairs
python -m stability.embed mode=cluster ckpt=RUN input=FILE clusters=8
python -m stability.embed mode=export ckpt=RUN out=FOLDER

ckpt: a run with objective=sentence_pairs (runs/<run_id>), its last planned step, or one of its checkpoints.
dir:  a folder of mode=export, or any folder of sentence-transformers (read by that library).

  mode=encode      writes embeddings.npy (float32, a row per text) and texts.jsonl (id and text of each row)
  mode=similarity  prints the cosine of two texts, or of each line's two texts
  mode=search      prints the k texts nearest to each query
  mode=cluster     prints the clusters' sizes and the texts nearest to their centres; out=FOLDER writes clusters.jsonl
  mode=export      writes a folder that SentenceTransformer(FOLDER, trust_remote_code=True) loads where this project is
                   installed; the folder holds weights and JSON, and no code
"""
SHOWN, WIDTH = 3, 67  # texts of a cluster, and characters of each


def main(argv: list[str]) -> int:
    """Embed the texts and answer in the way of the mode."""
    spec = read_about(EmbedSpec, Invocation.of(argv))
    if spec.out is not None:
        if Path(spec.out).exists():
            raise ValueError(f"out={spec.out} exists already; give a new folder")
        check_writable("out", spec.out)
    texts = _read_texts(spec)
    if spec.mode == "search" and spec.k > len(texts):
        raise ValueError(f"k={spec.k} is above the number of texts, {len(texts):,}; give k={len(texts)} or less")
    encoder = _open_encoder(spec)
    if spec.mode == "export":
        return _export(encoder, str(spec.out))
    if spec.mode == "similarity":
        return _compare(encoder, spec, texts)
    embeddings = encoder.encode(texts, spec.batch)
    if spec.mode == "encode":
        return _write(str(spec.out), embeddings, texts, encoder.name)
    if spec.mode == "search":
        return _search(encoder, spec, embeddings, texts)
    return _cluster(spec, embeddings, texts)


def _open_encoder(spec: EmbedSpec) -> Encoder | LibraryEncoder:
    from stability.build import resolve_device
    from stability.runs.phases import resolve_run_folder
    from stability.sentences.encoder import Encoder, open_encoder

    device = resolve_device(spec.device)
    if spec.dir is not None:
        folder = Path(spec.dir).expanduser().resolve()
        if not folder.is_dir():
            raise ValueError(f"dir={spec.dir}: no such folder; give one of mode=export or of sentence-transformers")
        return open_encoder(folder, device)
    place = resolve_run_folder(str(spec.ckpt), f"ckpt={spec.ckpt}", "an encoder is one run")
    return Encoder.of_checkpoint(_checkpoint_of(place, f"ckpt={spec.ckpt}"), device)


def _checkpoint_of(place: Path, word: str) -> Path:
    """Return the folder itself if it is a checkpoint; of a run that of its last planned step."""
    from stability.runs.directory import RunDirectory
    from stability.runs.phases import TERMINAL, phases

    if not (place / "spec.json").exists():
        return place
    found = phases(RunDirectory.at(place), TERMINAL)
    if TERMINAL not in found:
        raise ValueError(f"{word}: this run has no checkpoint of its last step; name a checkpoint, or another run")
    return found[TERMINAL]


def _read_texts(spec: EmbedSpec) -> list[str]:
    """Return the texts of ``input`` or ``data``; for similarity its lines."""
    if spec.data is not None:
        return _second_sentences(spec.data)
    return [] if spec.input is None else _read_lines("input", spec.input)


def _read_lines(key: str, file: str) -> list[str]:
    """Return a file's lines; the last one may be empty. Only a line break ends a line, as in an editor."""
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}={file}: not UTF-8 at byte {error.start:,}; save it as UTF-8") from None
    except OSError as error:
        raise ValueError(f"{key}={file}: {error.strerror}; give a text file") from None
    if lines == [""]:
        raise ValueError(f"{key}={file} is empty; give a text per line")
    if empty := [number for number, line in enumerate(lines, 1) if not line.strip()]:
        raise ValueError(f"{key}={file}, line {empty[0]:,} is empty; each line is a text")
    return lines


def _second_sentences(part: Part) -> list[str]:
    """Return the different second sentences of both sides of sentence data, whole."""
    source = Registry("data").load(part.name)
    if source.corpus.kind != "sentences":
        names = Registry("data").names()
        fitting = [name for name in names if Registry("data").load(name).corpus.kind == "sentences"]
        raise ValueError(f"data={part.name} has no sentences; choose {' or '.join(fitting)}")
    return source.prepare(part.settings).list_texts(1)


def _export(encoder: Encoder | LibraryEncoder, out: str) -> int:
    from stability.sentences import export
    from stability.sentences.encoder import Encoder

    assert isinstance(encoder, Encoder), "mode=export takes ckpt=RUN"

    export.write(Path(out), encoder.spec, encoder.model, encoder.data_format)
    print_text(f"{out}: SentenceTransformer('{out}', trust_remote_code=True) loads it where this project is installed")
    return 0


def _compare(encoder: Encoder | LibraryEncoder, spec: EmbedSpec, lines: Sequence[str]) -> int:
    """Print the cosine of each pair."""
    from stability.sentences.neighbours import unit_rows

    pairs = [line.split("\t") for line in lines] if spec.input is not None else [[str(spec.query), str(spec.text)]]
    for number, pair in enumerate(pairs, 1):
        if len(pair) != 2 or not all(text.strip() for text in pair):
            raise ValueError(f"input={spec.input}, line {number:,}: a pair is two texts with one tab between")
    first, second = (unit_rows(encoder.encode([pair[side] for pair in pairs], spec.batch)) for side in (0, 1))
    for pair, cosine in zip(pairs, (first * second).sum(1).tolist(), strict=True):
        print_text(f"{cosine:7.4f}  {_short(pair[0])} | {_short(pair[1])}")
    return 0


def _search(encoder: Encoder | LibraryEncoder, spec: EmbedSpec, embeddings: np.ndarray, texts: Sequence[str]) -> int:
    """Print the texts nearest to each query."""
    from stability.sentences.neighbours import find_nearest

    queries = [spec.query] if spec.query is not None else _read_lines("queries", str(spec.queries))
    found, cosines = find_nearest(encoder.encode(queries, spec.batch), embeddings, spec.k)
    print_text(f"{len(texts):,} texts")
    for query, indices, values in zip(queries, found.tolist(), cosines.tolist(), strict=True):
        print_text(f"query: {_short(query)}")
        for index, value in zip(indices, values, strict=True):
            print_text(f"  {value:7.4f}  {_short(str(texts[index]))}")
    return 0


def _cluster(spec: EmbedSpec, embeddings: np.ndarray, texts: Sequence[str]) -> int:
    """Print each cluster, the largest first."""
    from stability.sentences.neighbours import cluster

    labels, centres = cluster(embeddings, spec.clusters, spec.seed)
    if spec.out is not None:  # before the output, whose reader may leave
        rows = [
            {"id": number, "cluster": int(label), "text": text}
            for number, (label, text) in enumerate(zip(labels, texts, strict=True))
        ]
        _write_files(spec.out, {"clusters.jsonl": rows})
    distances = ((embeddings - centres[labels]) ** 2).sum(1)
    members = [(labels == number).nonzero()[0] for number in range(spec.clusters)]
    for own in sorted(members, key=len, reverse=True):
        print_text(f"{len(own):,} text{'s' * (len(own) != 1)}")
        for index in own[distances[own].argsort(kind="stable")][:SHOWN].tolist():
            print_text(f"  {_short(str(texts[index]))}")
    return 0


def _write(out: str, embeddings: np.ndarray, texts: Sequence[str], name: str) -> int:
    """Write the embeddings and their texts."""
    rows = [{"id": number, "text": text} for number, text in enumerate(texts)]
    _write_files(out, {"texts.jsonl": rows}, embeddings)
    print_text(f"{out}: {len(texts):,} embeddings of width {embeddings.shape[1]} by {name}")
    return 0


def _write_files(out: str, tables: dict[str, list[dict[str, Any]]], embeddings: np.ndarray | None = None) -> None:
    import numpy as np

    from stability.runs.directory import replace_folder

    with replace_folder(Path(out)) as aside:
        for name, rows in tables.items():
            lines = (json.dumps(row, ensure_ascii=False) for row in rows)
            (aside / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        if embeddings is not None:
            np.save(aside / "embeddings.npy", embeddings, allow_pickle=False)


def _short(text: str) -> str:
    """Return a text on one line, cut at `WIDTH` characters."""
    line = " ".join(text.split())
    return visible(line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…")


if __name__ == "__main__":
    run_entry(main, "embed", HELP)
