"""Store a measurement's table with its protocol, to decide later whether to measure again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stability.runs.parquet import has_columns, read_metadata, write_parquet
from stability.runs.schema import PROTOCOL


class Stored:
    """A parquet file, existing or not, and the protocol requested for its numbers.

    Args:
        path: the parquet file.
        protocol: the settings behind the numbers, as canonical JSON.
        columns: columns missing from files written before these columns were introduced.
    """

    def __init__(self, path: Path, protocol: str, columns: Sequence[str] = ()):
        self.path, self.protocol, self.columns = path, protocol, columns

    def read_protocol(self) -> str | None:
        """Return the file's protocol, or None if absent, damaged or not recorded."""
        try:
            return read_metadata(self.path).get(PROTOCOL) if self.path.exists() else None
        except ValueError:
            return None

    def decisive(self, protocol: str) -> Any:
        """Return the part of a protocol to compare; by default all."""
        return protocol

    def is_current(self) -> bool:
        """Return whether the file was measured under the requested protocol."""
        found = self.read_protocol()
        return (
            found is not None
            and self.decisive(found) == self.decisive(self.protocol)
            and has_columns(self.path, self.columns)
        )

    def write(self, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
        """Replace the file atomically."""
        write_parquet(pd.DataFrame(rows, columns=list(columns)), self.path, {PROTOCOL: self.protocol})
