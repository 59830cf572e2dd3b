"""Proteins: PDB and mmCIF files or prepared shards; by default documented synthetic chains."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stability.config import Settings
from stability.config.identity import Fingerprinted, Place
from stability.corpora.io import bar
from stability.corpora.io.files import find_files, origin_of, sha256_of_file, suffix_of
from stability.corpora.proteins import synthetic
from stability.corpora.proteins.annotations import check_annotations, read_annotations
from stability.corpora.proteins.chain import ProteinChain
from stability.corpora.proteins.corpus import VERSION as CORPUS_VERSION
from stability.corpora.proteins.corpus import ProteinCorpus
from stability.corpora.proteins.npz import read_npz
from stability.corpora.proteins.parsing import SUFFIXES
from stability.corpora.proteins.shards import TAR_SUFFIXES, shards
from stability.corpora.proteins.split import corpus_of
from stability.corpora.tokens.text_files import SUFFIXES as TEXT_SUFFIXES
from stability.data import AbstractDataSource
from stability.printable import print_text
from stability.runs.lock import RunLock

# Increment if the same files (or no file) would give other chains or another split. Not in the fingerprint: unchanged
# chains keep it. 3: files without occupancy or B-factors are read.
VERSION = 3
MOST_SHOWN = 10  # skipped files to print; the prepared folder's skipped.tsv has all


class ProteinConfig(Settings):
    """The settings of data=protein."""

    path: Annotated[str | None, Place()] = Field(
        default=None,
        min_length=1,
        description=(
            "PDB, mmCIF (.gz), a tar of them (.tar, .tar.gz, .tgz), .npz shards, or a folder of such files; null: "
            "synthetic chains"
        ),
    )
    annotations: Annotated[str | None, Place(), Fingerprinted()] = Field(
        default=None,
        min_length=1,
        description=(
            "UniProt flat file (.txt, .dat) or table (.tsv) by accession: domains, descriptions, orthologous groups"
        ),
    )
    plddt: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="whether B-factors are pLDDT: auto: where the file says that it is a predicted model",
    )
    min_residues: int = Field(
        default=10, ge=10, description="chains with fewer residues that have coordinates are left out"
    )
    held_out: float = Field(
        default=0.01, gt=0, le=0.5, description="share of the chains that is held out, in whole proteins"
    )


class Protein(AbstractDataSource):
    """Protein chains with structure and annotations, split by protein.

    A chain has sequence, coordinates, secondary structure (DSSP's nine classes), SASA, pLDDT and annotations.
    """

    Config: ClassVar[type[Settings]] = ProteinConfig
    corpus: ClassVar[Any] = ProteinCorpus

    @classmethod
    def prepare(cls, config: ProteinConfig, scratch: Path | None = None) -> ProteinCorpus:
        """Parse every file once; list unreadable files and reasons on stderr and in the corpus.

        Shards stay in a hidden folder of ``scratch`` until the corpus is complete, so an interrupted preparation
        resumes.

        Raises:
            ValueError: a file is invalid; the message names it and the remedy.
            RuntimeError: biotite is missing.
        """
        annotations = None if config.annotations is None else read_annotations(Path(config.annotations).expanduser())
        if config.path is None:
            return corpus_of(synthetic.chains(), (), annotations, synthetic.DESCRIPTION, config.held_out, scratch)
        files, skipped = protein_files(config.path), []
        key = sha256(str(cls.cache_key(config)).encode()).hexdigest()[:16]
        with bar("reading structures"), _workplace(scratch, key) as folder:
            found = _chains(files, folder, config, skipped)
            corpus = corpus_of(
                found, skipped, annotations, origin_of(config.path, files, "proteins"), config.held_out, scratch
            )
        _tell(skipped)
        return corpus

    @classmethod
    def cache_key(cls, config: ProteinConfig) -> str:
        """Return name and sha256 of each file, sha256 of the annotations, and settings.

        Folders of the files do not matter. The synthetic chains have their seed instead of files.
        """
        annotations = None
        if config.annotations is not None:
            check_annotations(file := Path(config.annotations).expanduser())
            annotations = sha256_of_file(file)
        files = (
            [] if config.path is None else [(file.name, sha256_of_file(file)) for file in protein_files(config.path)]
        )
        return json.dumps(
            [
                VERSION,
                CORPUS_VERSION,
                config.plddt,
                config.min_residues,
                config.held_out,
                annotations,
                files or ["synthetic", synthetic.SEED],
            ]
        )


def protein_files(path: str) -> list[Path]:
    """Return the file, or a folder's files, sorted.

    Raises:
        ValueError: as `find_files`.
    """
    return find_files(path, (*SUFFIXES, ".npz", *TAR_SUFFIXES), "structure file", other=("data=text", TEXT_SUFFIXES))


@contextmanager
def _workplace(scratch: Path | None, key: str) -> Iterator[Path]:
    """Yield a folder for shards; an interruption keeps it for the next preparation of the same files.

    Success or a ``ValueError`` removes it. If another process uses it, or without ``scratch``, the folder is private
    and always removed.
    """
    shared = None if scratch is None else scratch / f".proteins-{key}"
    lock = None if shared is None else RunLock(shared)
    is_ours = lock is not None and lock.acquire()
    folder = shared if shared is not None and is_ours else Path(tempfile.mkdtemp(prefix=".proteins-", dir=scratch))
    is_kept = False
    try:
        yield folder
    except ValueError:
        raise
    except BaseException:
        is_kept = is_ours
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.release()


def _chains(
    files: list[Path], folder: Path, config: ProteinConfig, skipped: list[tuple[str, str]]
) -> Iterator[ProteinChain]:
    """Yield the chains of all files; ``skipped`` grows on the way."""
    ready = [file for file in files if suffix_of(file, (".npz",))]
    structures = [file for file in files if file not in set(ready)]
    made = shards(structures, folder, config.plddt, config.min_residues) if structures else ()
    for found, reasons in chain((read_npz(file, config.min_residues) for file in ready), map(read_npz, made)):
        skipped += reasons
        yield from found


def _tell(skipped: list[tuple[str, str]]) -> None:
    """Print the first skipped files and the number of others on stderr."""
    for name, reason in skipped[:MOST_SHOWN]:
        print_text(f"skipped {name}: {reason}", file=sys.stderr)
    if len(skipped) > MOST_SHOWN:
        print_text(
            f"and {len(skipped) - MOST_SHOWN:,} more, all listed in the prepared data's skipped.tsv", file=sys.stderr
        )


EXPORT = Protein
