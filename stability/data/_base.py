"""A data source is the class that each file of this folder exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from stability.config import Settings
from stability.corpora.base import AbstractCorpus
from stability.corpora.tokens.corpus import Corpus


class AbstractDataSource:
    """Base of every data source. A subclass holds its `Config` and implements `prepare`; `cache_key` spares a second
    preparation.

    ``corpus``: the class of what it prepares; its ``kind`` is what objectives ask for.
    """

    family: ClassVar[str] = "data"
    corpus: ClassVar[type[AbstractCorpus]] = Corpus
    Config: ClassVar[type[Settings]]

    @classmethod
    def prepare(cls, config: Any, scratch: Path | None = None) -> AbstractCorpus:
        """Read (and tokenise) everything. ``scratch``: a folder on the disk that the corpus will lie on, for unnamed
        files; None: the system's temporary one.

        Errors: ``ValueError`` of one or two lines: field or file, place, what would be right.
        """
        raise NotImplementedError

    @classmethod
    def cache_key(cls, config: Any) -> str | None:
        """Return a string that changes whenever `prepare` would give another corpus, found without preparing it. None:
        prepare every time.

        Errors: ``ValueError`` as `prepare`, as far as what it looks at is concerned.
        """
        return None

    @classmethod
    def tokens_of(cls, config: Any) -> str:
        """Name its tokens as a caption does: "nucleotides"; "": not said."""
        return ""

    @classmethod
    def remedy(cls, config: Any, corpus: Any) -> str:
        """Name those of its settings that may help where windows are too long for a side of the corpus: ", or
        data.…=…"; empty: none."""
        return ""

    @classmethod
    def stand_in(cls, config: Any) -> AbstractCorpus | None:
        """Return random tokens of the vocabulary that `prepare` would give, for a plan: what a source returns that
        would have to download. None: `prepare`."""
        return None
