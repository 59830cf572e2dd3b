"""GPT-2's byte-pair encoding (Radford et al. 2019) through tiktoken.

Rank files are read from a folder, tiktoken's cache, or the network.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from stability.corpora.tokens.vocabulary import AbstractTokenizer, Vocabulary

FILES = ("vocab.bpe", "encoder.json")
# sha256
SUMS = (
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
)
HOME = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
END_OF_TEXT = "<|endoftext|>"
SEPARATORS = (END_OF_TEXT, "</s>")  # the first existing one separates documents
SPECIAL = re.compile(r"<.+>|\[.+\]", re.DOTALL)  # form of special tokens
# 50,000 merges, 256 bytes; identifies GPT-2's own files
GPT2_SIZE = 50_256


class Gpt2Tokenizer(AbstractTokenizer):
    """GPT-2's byte-pair encoding as a tokenizer.

    ``<|endoftext|>`` within a text is encoded as text. The token with this name separates documents; ``</s>`` if there
    is none. Special tokens may be numbered before the bytes, as by Hugging Face's tokenizers.
    """

    def __init__(self, ranks: str | None):
        tiktoken = _tiktoken()
        if ranks is None:
            _check_reach()
            self._encoding: Any = tiktoken.get_encoding("gpt2")
        else:
            from tiktoken_ext.openai_public import r50k_pat_str

            numbers, specials = read_ranks(Path(ranks).expanduser())
            self._encoding = tiktoken.Encoding(
                "gpt2", pat_str=r50k_pat_str, mergeable_ranks=numbers, special_tokens=specials
            )
        self._describe(ranks)

    def _describe(self, ranks: str | None) -> None:
        """Set vocabulary and label from the encoding."""
        size = self._encoding.n_vocab
        pieces = tuple(self._encoding.decode_single_token_bytes(token) for token in range(size))
        name = next(each for each in SEPARATORS if each in self._encoding.special_tokens_set)
        self.vocabulary = Vocabulary("gpt2", pieces, separator=self._encoding.encode_single_token(name))
        self.label = f"GPT-2 BPE, {size:,} tokens" if size == GPT2_SIZE + 1 else f"BPE of {ranks}, {size:,} tokens"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON for `of_json`: pattern, byte pairs by number, and special tokens."""
        ranks = {piece.decode("latin-1"): number for piece, number in self._encoding._mergeable_ranks.items()}
        return {"pattern": self._encoding._pat_str, "ranks": ranks, "specials": self._encoding._special_tokens}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Gpt2Tokenizer:
        """Return the tokenizer of `to_json`, without rank files.

        Raises:
            RuntimeError: tiktoken is not installed.
        """
        made = cls.__new__(cls)
        ranks = {piece.encode("latin-1"): number for piece, number in values["ranks"].items()}
        made._encoding = _tiktoken().Encoding(
            "gpt2", pat_str=values["pattern"], mergeable_ranks=ranks, special_tokens=values["specials"]
        )
        made._describe("a deployed model")
        return made

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of ``text``, a 1-D uint32 array."""
        return self._encoding.encode_to_numpy(text, disallowed_special=())


def read_ranks(folder: Path) -> tuple[dict[bytes, int], dict[str, int]]:
    """Return tokens' numbers by their bytes, in merge order, and special tokens' by name.

    The order is the 256 bytes, then one merge per line of vocab.bpe; encoder.json must number tokens in this order. All
    other tokens in encoder.json, before or after these, must be special tokens. If none of them ends a document, one is
    added.

    Raises:
        ValueError: a file is invalid; the message names the file and the place.
    """
    merges_file, numbers_file = _rank_files(folder)
    # in rank order: printable Latin-1 characters represent themselves, U+0100… all other bytes
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + index): byte for index, byte in enumerate(others)},
    }
    tokens = {bytes([byte]): character for character, byte in byte_of.items()}
    lines = _text(merges_file).splitlines()
    for number, line in enumerate(lines, start=1):
        if number == 1 and line.startswith("#version"):
            continue
        parts = line.split()
        if len(parts) != 2 or not set(line) - {" "} <= set(byte_of):
            raise ValueError(f"data.ranks: {merges_file}, line {number} is no merge of two tokens: {line[:40]!r}")
        written = "".join(parts)
        tokens[bytes(byte_of[character] for character in written)] = written
    numbers = _numbers(numbers_file)
    specials = _specials(numbers, set(tokens.values()), numbers_file)
    ranks = {token: numbers.get(written, -1) for token, written in tokens.items()}
    in_order = list(ranks.values())
    if in_order != sorted(set(in_order)) or {*in_order, *specials.values()} != set(range(len(numbers))):
        raise ValueError(
            f"data.ranks: {numbers_file} does not number the {len(ranks):,} tokens of {FILES[0]} beside it; the two do "
            "not belong together"
        )
    return ranks, specials if any(name in specials for name in SEPARATORS) else {**specials, END_OF_TEXT: len(numbers)}


def _numbers(file: Path) -> dict[str, int]:
    """Return each token's number from encoder.json; {} for JSON with another form.

    Raises:
        ValueError: the file is no JSON.
    """
    try:
        found = json.loads(_text(file))
    except ValueError as error:
        raise ValueError(f"data.ranks: {file} is no JSON ({error})") from None
    is_table = isinstance(found, dict) and all(type(number) is int for number in found.values())
    return found if is_table else {}


def _specials(numbers: dict[str, int], known: set[str], file: Path) -> dict[str, int]:
    """Return the tokens not produced by vocab.bpe.

    Raises:
        ValueError: one is not written as a special token, so the two files do not match.
    """
    specials = {name: number for name, number in numbers.items() if name not in known}
    ordinary = next((name for name in specials if not SPECIAL.fullmatch(name)), None)
    if ordinary is not None:
        raise ValueError(
            f"data.ranks: {file} numbers {ordinary!r}, which {FILES[0]} beside it does not make and which is not "
            "written as a special token, <…> or […]; the two do not belong together"
        )
    return specials


def sha256_of_ranks(ranks: str | None) -> str | None:
    """Return the sha256 over both files; None for tiktoken's own files, verified by tiktoken.

    Raises:
        ValueError: a file is missing.
    """
    if ranks is None:
        return None
    digest = hashlib.sha256()
    for file in _rank_files(Path(ranks).expanduser()):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _rank_files(folder: Path) -> list[Path]:
    files = [folder / name for name in FILES]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(
            f"data.ranks={folder}: no {' and no '.join(missing)} in it; give the folder that holds GPT-2's "
            f"{FILES[0]} and {FILES[1]}"
        )
    return files


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.ranks: {file} is not UTF-8 at byte {error.start:,}") from None
    except OSError as error:
        raise ValueError(f"data.ranks: cannot read {file}: {error.strerror}") from None


def _check_reach() -> None:
    """Raise a ``RuntimeError`` if the rank files are neither cached nor reachable.

    A damaged cached file counts as missing, since tiktoken downloads such files again.
    """
    cached = [_cache_folder() / hashlib.sha1((HOME + name).encode()).hexdigest() for name in FILES]
    if all(
        file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == known
        for file, known in zip(cached, SUMS, strict=True)
    ):
        return
    state = "damaged" if all(file.is_file() for file in cached) else "missing"
    # tiktoken itself has no timeout
    try:
        urllib.request.urlopen(urllib.request.Request(HOME + FILES[1], method="HEAD"), timeout=5).close()
    except OSError as error:  # URLError, HTTPError and time-outs are OSErrors
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise RuntimeError(
            f"data.tokenizer=gpt2: GPT-2's rank files are {state} in tiktoken's cache ({_cache_folder()}) and not to "
            f"be had from the network ({reason}).\nName a folder with {FILES[0]} and {FILES[1]}: data.ranks=FOLDER"
        ) from None


def _cache_folder() -> Path:
    """Return tiktoken's cache folder."""
    own = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    return Path(own) if own is not None else Path(tempfile.gettempdir(), "data-gym-cache")


def _tiktoken() -> Any:
    try:
        import tiktoken
    except ImportError:
        raise RuntimeError("data.tokenizer=gpt2 needs tiktoken, which is not installed; pip install tiktoken") from None
    return tiktoken
