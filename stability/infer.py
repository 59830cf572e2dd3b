"""``python -m stability.infer dir=… text=…``: answer from a deployed model, without the run that trained it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from stability.cli.compose import add_listed_plugins, read
from stability.cli.entry import check_writable, run_entry
from stability.cli.words import Invocation
from stability.config.deployment import InferSpec
from stability.printable import line_of, print_text

if TYPE_CHECKING:
    from stability.deployed.answers import Answerer

HELP = """
python -m stability.infer dir=DIR text='…' [key=value …]
python -m stability.infer dir=DIR input=FILE output=ANSWERS.jsonl
python -m stability.infer dir=DIR input=- <QUESTIONS.jsonl >ANSWERS.jsonl
python -m stability.infer dir=DIR interactive=true
python -m stability.infer dir=[DIR,DIR] benchmark=true

dir: a folder of stability.deploy. The answers depend on what the model was trained for:

  ar                the text's NLL per token after the first, and num=1 continuations of tokens=64 tokens
                    (temperature, top_p, seed)
  mlm, score_entropy   the text with each [MASK] filled, the model's surest first, and the top=5 tokens of each; a mask
                    is one token, of bytes one byte
  DNA, proteins     the same; _ stands for a masked letter
  classify          an image file's likeliest classes with their probabilities; text= is its path

input: a .jsonl file with {"text": "…"} ({"image": "…"} for classes) in each line, any other file with a text a line,
or - for JSON lines from the standard input, answered one by one. benchmark: tokens a second and peak memory at batch 1
and 32, each in a fresh process.
"""
STDIN = "-"


def main(argv: list[str]) -> int:
    """Answer one text, a file, the standard input or a terminal; or measure speed."""
    invocation = Invocation.of(argv)
    add_listed_plugins(invocation)
    spec = read(InferSpec, invocation)
    if spec.benchmark:
        return _benchmark(spec)
    _check_files(spec)
    answerer = _load(spec)
    if spec.text is not None:
        _print(answerer, spec.text, 0)
    elif spec.interactive:
        _converse(answerer)
    else:
        _answer_all(answerer, spec)
    return 0


def _load(spec: InferSpec) -> Answerer:
    from stability.build import resolve_device
    from stability.deployed import load
    from stability.deployed.answers import Answerer

    return Answerer(load(spec.dir[0]), spec, resolve_device(spec.device))


def _check_files(spec: InferSpec) -> None:
    """Refuse a missing input and an unwritable output before a model is loaded."""
    if spec.interactive or spec.input == STDIN:
        if sys.stdin is None:  # after a shell's `<&-`
            raise ValueError("the standard input is closed; give text=… or input=FILE")
    elif spec.input is not None and (not Path(spec.input).exists() or Path(spec.input).is_dir()):
        raise ValueError(f"input={spec.input}: no such file; give a file, or - for the standard input")
    if spec.output is not None:
        _check_output(Path(spec.output), Path(str(spec.input)), Path(spec.dir[0]))


def _check_output(output: Path, source: Path, folder: Path) -> None:
    """Refuse an output that is no file to replace, or whose replacement would lose the texts or the model."""
    check_writable("output", str(output.parent))
    if output.is_symlink() or (output.exists() and not output.is_file()):  # e.g. /dev/stdout, which a rename replaces
        raise ValueError(f"output={output}: is no plain file; give a file's name, or leave it out for standard output")
    for owner, lost in (("the input", source), *(("the deployed model", each) for each in folder.glob("*"))):
        if output.exists() and lost.exists() and output.samefile(lost):
            raise ValueError(f"output={output}: is a file of {owner}; give another one")


def _print(answerer: Answerer, text: str, index: int) -> None:
    from stability.deployed.answers import describe

    for line in describe(answerer.answer(text, index)):
        print_text(line)


def _converse(answerer: Answerer) -> None:
    """Answer each line of the terminal until its end; a text that cannot be answered is refused in a line."""
    is_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # refused as a text, in a line
    if is_terminal:
        print_text("a line is a text; Ctrl-D ends")
    for index, line in enumerate(iter(lambda: _read_line(is_terminal), "")):
        try:
            _print(answerer, line.rstrip("\n"), index)
        except ValueError as error:
            print_text(f"error: {error}")
        sys.stdout.flush()


def _read_line(is_terminal: bool) -> str:
    if is_terminal:
        sys.stdout.write("> ")
        sys.stdout.flush()
    return sys.stdin.readline()


def _answer_all(answerer: Answerer, spec: InferSpec) -> None:
    """Answer all texts of a file or the standard input; with ``output`` they are written whole or not at all."""
    from stability.runs.directory import write_atomically

    with _open_texts(str(spec.input)) as stream:
        is_stdin = spec.input == STDIN
        name = "the standard input" if is_stdin else str(spec.input)
        is_json = is_stdin or Path(name).suffix in (".jsonl", ".ndjson")
        texts = _read_texts(stream, name, answerer.key, is_json)
        if spec.output is None:
            _answer_lines(answerer, texts, sys.stdout)
            return
        rows = [_answer_row(answerer, *each) for each in texts]
    write_atomically(Path(spec.output), "".join(rows).encode())
    print_text(f"answers: {len(rows)} in {spec.output}")


@contextmanager
def _open_texts(place: str) -> Iterator[TextIO]:
    """Open a file, or the standard input, as UTF-8; undecodable bytes become surrogates, without a byte order mark."""
    if place != STDIN:
        with open(place, encoding="utf-8-sig", errors="surrogateescape") as stream:
            yield stream
        return
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")
    yield sys.stdin


def _answer_lines(answerer: Answerer, texts: Iterator[tuple[str, int, str]], stream: TextIO) -> None:
    for each in texts:
        stream.write(_answer_row(answerer, *each))
        stream.flush()


def _answer_row(answerer: Answerer, text: str, index: int, place: str) -> str:
    """Return an answer as a JSON line; ASCII, so that no text moves a terminal."""
    try:
        return json.dumps(answerer.answer(text, index)) + "\n"
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _read_texts(stream: TextIO, name: str, key: str, is_json: bool) -> Iterator[tuple[str, int, str]]:
    """Yield each text with its number and place; blank lines of JSON are skipped.

    Raises:
        ValueError: a line is malformed, or there is no text.
    """
    is_empty = True
    for index, line in enumerate(stream):
        if is_json and not line.strip():
            continue
        place, is_empty = f"{name}, line {index + 1}", False
        if any("\udc80" <= letter <= "\udcff" for letter in line):  # bytes that `_open_texts` could not decode
            raise ValueError(f"{place} is not UTF-8; convert it")
        yield _parse_line(line, place, key) if is_json else line.rstrip("\n"), index, place
    if is_empty:
        raise ValueError(f"{name} is empty; give a text in each line")


def _parse_line(line: str, place: str, key: str) -> str:
    try:
        row = json.loads(line.rstrip("\n"))
    except (ValueError, RecursionError) as error:
        is_syntax = isinstance(error, json.JSONDecodeError)
        why = f"{error.msg}, column {error.colno}" if is_syntax else line_of(error)
        raise ValueError(f"{place} is no JSON ({why})") from None
    if not isinstance(row, dict) or not isinstance(row.get(key), str):
        raise ValueError(f'{place} must be an object with a text under "{key}", e.g. {{"{key}": "…"}}')
    return row[key]


def _benchmark(spec: InferSpec) -> int:
    """Print tokens a second and peak memory of each folder, at batch 1 and 32."""
    from stability.deployed.benchmark import BATCHES, describe_row, measure_anew
    from stability.deployed.folder import read_manifest

    manifests = [read_manifest(Path(folder)) for folder in spec.dir]
    for folder, manifest in zip(spec.dir, manifests, strict=True):
        for batch in BATCHES:
            print_text(describe_row(folder, manifest, measure_anew(folder, batch, spec)))
    return 0


if __name__ == "__main__":
    run_entry(main, "infer", HELP)
