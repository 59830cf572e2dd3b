"""Data sources, one file each; each yields a corpus of one kind (see `stability.corpora`)."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from stability.config import Place, Settings
from stability.corpora.base import AbstractCorpus
from stability.corpora.tokens.corpus import Corpus

__all__ = ["AbstractDataSource"]


class AbstractDataSource:
    """Base of every data source.

    A subclass has its `Config` and implements `prepare`; `cache_key` avoids a second preparation. ``corpus`` is the
    class of the prepared data; objectives require its ``kind``.
    """

    family: ClassVar[str] = "data"
    corpus: ClassVar[type[AbstractCorpus]] = Corpus
    Config: ClassVar[type[Settings]]
    # whether a source with a `stand_in` downloads; else a dry run reads the data in a pool that exists
    downloads: ClassVar[bool] = True

    @classmethod
    def prepare(cls, config: Any, scratch: Path | None = None) -> AbstractCorpus:
        """Read (and tokenise) everything.

        Args:
            config: the settings.
            scratch: folder for unnamed files, on the disk of the future corpus; None: the system's temporary folder.

        Raises:
            ValueError: the data are invalid; one or two lines with field or file, place, and remedy.
        """
        raise NotImplementedError

    @classmethod
    def cache_key(cls, config: Any) -> str | None:
        """Return a string that changes whenever `prepare` would give another corpus.

        It is computed without preparing. None: prepare every time.

        Raises:
            ValueError: as `prepare`, for the files checked here.
        """
        return None

    @classmethod
    def inputs(cls, config: Any) -> Iterator[Path]:
        """Yield the files that `prepare` reads, and their folders: changes of these change `cache_key`.

        A path that does not exist, e.g. the name of a dataset on a hub, is yielded, too.
        """
        for name, field in cls.Config.model_fields.items():
            if getattr(config, name) is not None and any(isinstance(marker, Place) for marker in field.metadata):
                path = Path(getattr(config, name)).expanduser()
                yield path
                for folder, folders, files in os.walk(path, followlinks=True):
                    yield from (Path(folder, each) for each in (*folders, *files))

    @classmethod
    def tokens_of(cls, config: Any) -> str:
        """Name its tokens for a caption, e.g. "nucleotides"; "" if unknown."""
        return ""

    @classmethod
    def remedy(cls, config: Any, corpus: Any) -> str:
        """Name settings that may help if windows are too long for the corpus.

        Too long means longer than one of its sides allows. Form: ", or data.…=…"; "" if none.
        """
        return ""

    @classmethod
    def stand_in(cls, config: Any) -> AbstractCorpus | None:
        """Return random tokens of the same vocabulary for a dry run, or None.

        Sources that would have to download return them, and those that parse for seconds; None: use `prepare`.
        """
        return None
