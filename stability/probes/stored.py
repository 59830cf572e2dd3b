"""A measurement leaves a table on disk, and in it the protocol that it was measured by, which tells whether it has to
be measured again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stability.runs.parquet import holds_columns, read_metadata, write_parquet
from stability.runs.schema import PROTOCOL


class Stored:
    """A parquet file, there or not, and the ``protocol`` that is asked for: what its numbers depend on, as canonical
    JSON. ``columns``: those that a file measured before there were such columns lacks."""

    def __init__(self, path: Path, protocol: str, columns: Sequence[str] = ()):
        self.path, self.protocol, self.columns = path, protocol, columns

    def found(self) -> str | None:
        """Return the protocol that the file was measured by; None if there is no file, it is damaged, or it does not
        say."""
        try:
            return read_metadata(self.path).get(PROTOCOL) if self.path.exists() else None
        except ValueError:
            return None

    def decisive(self, protocol: str) -> Any:
        """Return what of a protocol has to agree for the file to count as measured; all, for most tables."""
        return protocol

    def is_current(self) -> bool:
        """Return whether the file was measured under the protocol that is asked for."""
        found = self.found()
        return (
            found is not None
            and self.decisive(found) == self.decisive(self.protocol)
            and holds_columns(self.path, self.columns)
        )

    def write(self, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
        """Replace the file, or leave it as it was."""
        write_parquet(pd.DataFrame(rows, columns=list(columns)), self.path, {PROTOCOL: self.protocol})
