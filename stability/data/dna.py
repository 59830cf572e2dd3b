"""DNA (or RNA): FASTA files, or by default a documented synthetic genome."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from stability.config import Settings
from stability.config.identity import Place
from stability.corpora.io import bar
from stability.corpora.io.files import find_files, origin_of, sha256_of_file, total_bytes
from stability.corpora.tokens import synthetic_genome as synthetic
from stability.corpora.tokens.augmentation import encode
from stability.corpora.tokens.corpus import Corpus
from stability.corpora.tokens.fasta import SUFFIXES, records
from stability.corpora.tokens.records import VERSION as RECORDS_VERSION
from stability.corpora.tokens.records import HoldOut, split_records
from stability.corpora.tokens.text_files import SUFFIXES as TEXT_SUFFIXES
from stability.data import AbstractDataSource

# Increment if the same files (or no file) would give other records.
VERSION = 1


class DnaConfig(Settings):
    """The settings of data=dna."""

    path: Annotated[str | None, Place()] = Field(
        default=None,
        min_length=1,
        description="a .fa, .fasta, .fna, .fas or .ffn file (each with .gz, .zst or .xz, too), or a folder of them; "
        "null: a synthetic genome",
    )
    hold_out: HoldOut = Field(
        default="auto",
        description=(
            "records: whole ones, 1 % of the nucleotides; region: the middle 1 % of every record; auto: records if "
            "there are 20 or more"
        ),
    )
    reverse_complement: bool = Field(
        default=False, description="whether training windows are turned into the other strand with probability one half"
    )


class Dna(AbstractDataSource):
    """Nucleotides: 17 tokens, one per IUPAC code and one for the gap.

    Windows lie within a record; shorter records are omitted.
    """

    Config: ClassVar[type[Settings]] = DnaConfig

    @classmethod
    def prepare(cls, config: DnaConfig, scratch: Path | None = None) -> Corpus:
        """Read every file once.

        Raises:
            ValueError: a file is invalid; the message names file, record, line and character.
        """
        if config.path is None:
            made = ((name, encode(letters)) for name, letters in synthetic.chromosomes())
            return split_records(made, synthetic.DESCRIPTION, config.hold_out, config.reverse_complement, scratch)
        files = fasta_files(config.path)
        with bar("reading FASTA", num_bytes=total_bytes(files)):
            found = (record for file in files for record in records(file))
            return split_records(
                found, origin_of(config.path, files, "DNA"), config.hold_out, config.reverse_complement, scratch
            )

    @classmethod
    def cache_key(cls, config: DnaConfig) -> str:
        """Return the sha256 of each file (or the synthetic genome's seed) and the settings.

        Names and folders of the files do not matter.
        """
        files = [] if config.path is None else fasta_files(config.path)
        sums = sorted(sha256_of_file(file) for file in files) if files else ["synthetic", synthetic.SEED]
        return json.dumps([VERSION, RECORDS_VERSION, config.hold_out, config.reverse_complement, sums])

    @classmethod
    def tokens_of(cls, config: DnaConfig) -> str:
        return "nucleotides"

    @classmethod
    def remedy(cls, config: DnaConfig, corpus: Corpus) -> str:
        """Name hold_out=records if the middle of several records was held out."""
        is_cut = corpus.train_borders is not None and len(corpus.train_borders) - 1 > corpus.num_train_documents
        return ", or data.hold_out=records" if is_cut and corpus.num_train_documents > 1 else ""


def fasta_files(path: str) -> list[Path]:
    """Return the file, or a folder's files of `SUFFIXES`, sorted.

    Raises:
        ValueError: as `find_files`.
    """
    return find_files(path, SUFFIXES, "FASTA file", other=("data=text", TEXT_SUFFIXES))


EXPORT = Dna
