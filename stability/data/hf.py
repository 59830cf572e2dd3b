"""A dataset of the Hugging Face hub, streamed up to a number of documents.

The whole dataset is never on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from stability.config import Settings
from stability.config.identity import Fingerprinted, Place
from stability.corpora.io import bar
from stability.corpora.io.files import sha256_of_file
from stability.corpora.tokens.augmentation import CODES, INVALID, encode
from stability.corpora.tokens.corpus import Corpus, draw_stand_in
from stability.corpora.tokens.gpt2 import GPT2_SIZE
from stability.corpora.tokens.records import VERSION as RECORDS_VERSION
from stability.corpora.tokens.records import split_records
from stability.corpora.tokens.settings import AbstractTokenized
from stability.corpora.tokens.split import split_documents
from stability.corpora.tokens.text_files import check_text
from stability.data import AbstractDataSource

# Increment if the same dataset would give other documents.
VERSION = 1
PROBE_SECONDS = 5
EXAMPLE = "HuggingFaceFW/fineweb-edu"
HUB_ID = r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?"  # owner/name or name; write a folder of this form as ./owner/name
CONVERTED = "refs/convert/parquet"  # the hub's branch with a dataset as Parquet files


class HuggingFaceConfig(AbstractTokenized):
    """The settings of data=hf: dataset, rows, and tokenizer."""

    tokenizer: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride]
        Literal["bytes", "gpt2", "nucleotides"], Fingerprinted()
    ] = Field(
        default="bytes",
        description="bytes: UTF-8; gpt2: GPT-2's byte-pair encoding; nucleotides: the codes of the IUPAC, as data=dna",
    )
    dataset: Annotated[str, Place(names=HUB_ID)] = Field(
        min_length=1, description="id on the hub, e.g. Skylion007/openwebtext, or a folder of data files"
    )
    subset: str | None = Field(
        default=None, min_length=1, description="the dataset's configuration, e.g. sample-10BT; null: its default"
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        description="commit or tag on the hub, which pins the content; null: what it holds on the day",
    )
    split: str = Field(
        default="train", min_length=1, description="the dataset's own split that is read; a part of it is held out here"
    )
    field: str = Field(default="text", min_length=1, description="column that holds the text (or the nucleotides)")
    max_documents: int = Field(default=10_000, ge=2, description="rows read, from the first on")
    reverse_complement: bool = Field(
        default=False, description="whether training windows are turned into the other strand at random (nucleotides)"
    )

    @model_validator(mode="after")
    def _check_nucleotides_only(self) -> HuggingFaceConfig:
        if self.reverse_complement and self.tokenizer != "nucleotides":
            raise ValueError(
                "data.reverse_complement=true belongs to data.tokenizer=nucleotides "
                f"(data.tokenizer={self.tokenizer} given)"
            )
        return self


class HuggingFaceDataset(AbstractDataSource):
    """Documents are the rows of a streamed dataset; for nucleotides each row is a record."""

    Config: ClassVar[type[Settings]] = HuggingFaceConfig

    @classmethod
    def prepare(cls, config: HuggingFaceConfig, scratch: Path | None = None) -> Corpus:
        """Read the rows as they arrive.

        Raises:
            ValueError: a row is invalid; the message names dataset and row.
            RuntimeError: the library or the network is missing.
        """
        if not _is_folder(config):
            _check_id(config)
        origin = _origin(config)
        with bar(f"reading {config.dataset}", num_items=config.max_documents):
            if config.tokenizer == "nucleotides":
                return split_records(_records(config), f"DNA of {origin}", "auto", config.reverse_complement, scratch)
            tokenizer = config.build_tokenizer()
            return split_documents(
                (text for _, text in _texts(config)),
                f"text of {origin}",
                ".",
                tokenizer=tokenizer,
                keep=config.keep,
                scratch=scratch,
            )

    @classmethod
    def tokens_of(cls, config: HuggingFaceConfig) -> str:
        return config.label

    @classmethod
    def cache_key(cls, config: HuggingFaceConfig) -> str:
        """Return all settings, with the sha256 of a folder's files.

        A dataset on the hub is assumed unchanged; ``revision`` guarantees it.
        """
        settings = {**config.model_dump(mode="json"), "ranks": None}
        if _is_folder(config):
            folder = Path(config.dataset).expanduser()
            files = sorted(
                (file.relative_to(folder).as_posix(), sha256_of_file(file))
                for file in folder.rglob("*")
                if file.is_file()
            )
            settings["dataset"] = hashlib.sha256(json.dumps(files).encode()).hexdigest()
        return json.dumps([VERSION, settings], sort_keys=True) + (
            f"records {RECORDS_VERSION}" if config.tokenizer == "nucleotides" else config.tokenizer_key()
        )

    @classmethod
    def stand_in(cls, config: HuggingFaceConfig) -> Corpus | None:
        """Return random tokens for a dataset on the hub, without network access.

        The tokenizer alone determines the vocabulary.

        Raises:
            ValueError: rank files are unreadable, or the dataset can only be a folder but does not exist.
        """
        if _is_folder(config):
            return None
        _check_id(config)
        size = _vocab_size(config)
        description = (
            f"{_origin(config)}, up to {config.max_documents:,} rows, {config.tokenizer}, {size:,} tokens in the "
            "vocabulary"
        )
        return draw_stand_in(size, description)


def _origin(config: HuggingFaceConfig) -> str:
    return (
        f"{Path(config.dataset).name if _is_folder(config) else config.dataset}"
        f"{f' ({config.subset})' if config.subset else ''}, {config.split}"
    )


def _vocab_size(config: HuggingFaceConfig) -> int:
    if config.tokenizer == "nucleotides":
        return len(CODES)
    if config.tokenizer == "gpt2" and config.keep is not None:
        return config.keep + 1
    if config.tokenizer == "gpt2" and config.ranks is None:
        return GPT2_SIZE + 1
    return len(config.build_tokenizer().vocabulary.pieces)


def _texts(config: HuggingFaceConfig) -> Iterator[tuple[int, str | None]]:
    """Yield (row number, text), None for null; skip empty texts."""
    for number, row in enumerate(_rows(config), start=1):
        place = f"data.dataset={config.dataset}, row {number}"
        if config.field not in row:
            raise ValueError(
                f"{place} has no column '{config.field}'; it has: {', '.join(map(str, row)) or 'none'}; name one "
                "with data.field=COLUMN"
            )
        if (text := check_text(row[config.field], place, config.field)) != "":
            yield number, text


def _records(config: HuggingFaceConfig) -> Iterator[tuple[str, bytes]]:
    for number, text in _texts(config):
        tokens = encode((text or "").encode("utf-8"))
        if (at := tokens.find(INVALID)) >= 0:
            assert text is not None, "what has a character"
            character = text[len(text.encode("utf-8")[:at].decode("utf-8", "ignore"))]
            raise ValueError(
                f"data.dataset={config.dataset}, row {number}, character {at + 1} is {character!r}, which is no "
                f"nucleotide.\nAccepted are the codes of the IUPAC, {CODES[:-1]}, in either case, and the gap, - or ."
            )
        yield str(number), tokens


def _rows(config: HuggingFaceConfig) -> Iterator[dict[str, Any]]:
    """Yield the dataset's rows as they are streamed; two-line ``ValueError`` if unreadable."""
    datasets = _datasets()
    # the error of the hub client's HTTP library; not always an OSError
    from huggingface_hub.errors import HTTPError

    if not _is_folder(config):
        _check_reach(config)
    try:
        place = str(Path(config.dataset).expanduser()) if _is_folder(config) else config.dataset
        rows = datasets.load_dataset(place, config.subset, split=config.split, revision=config.revision, streaming=True)
        yield from islice(rows, config.max_documents)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        datasets.exceptions.DatasetsError,
        HTTPError,
    ) as error:
        if isinstance(error, RuntimeError) and "scripts are no longer supported" in str(error):
            raise ValueError(
                f"data.dataset={config.dataset} is a script, which the installed datasets {datasets.__version__} "
                f"does not run.\nThe hub's own conversion of it may be read: data.revision={CONVERTED}"
            ) from None
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise ValueError(
            f"data.dataset={config.dataset}: cannot read its split '{config.split}'.\n({type(error).__name__}: "
            f"{reason})"
        ) from None


def _is_folder(config: HuggingFaceConfig) -> bool:
    return Path(config.dataset).expanduser().is_dir()


def _check_id(config: HuggingFaceConfig) -> None:
    """Raise a ``ValueError`` for a missing folder: a name outside the form `HUB_ID`."""
    if not re.fullmatch(HUB_ID, config.dataset):
        raise ValueError(
            f"data.dataset={config.dataset}: no such folder.\nGive a folder of data files, or an id on the hub such "
            f"as {EXAMPLE}"
        )


def _datasets() -> Any:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        import datasets
    except ImportError:
        raise RuntimeError("data=hf needs the library datasets, which is not installed; pip install datasets") from None
    datasets.disable_progress_bars()
    return datasets


def _check_reach(config: HuggingFaceConfig) -> None:
    """Raise a ``RuntimeError`` if the hub does not answer; proxies are respected."""
    # The hub's own client would retry for half a minute.
    try:
        urllib.request.urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=PROBE_SECONDS).close()
    except urllib.error.HTTPError:
        return
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise RuntimeError(
            f"data.dataset={config.dataset}: no such folder, and the hub does not answer ({reason}).\nWithout a "
            "network use files: data=text data.path=FOLDER"
        ) from None


EXPORT = HuggingFaceDataset
