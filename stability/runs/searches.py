"""Tables of sweeps that choose their own runs (`lr=edge`, `search=optuna`). No torch.

The rows come from ``study.json``.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from stability.runs.schema import SEARCH_COLUMNS


def search_tables(record: dict[str, Any]) -> dict[str, pd.DataFrame]:
    """Return the search tables of a study's record by name."""
    return {
        name: pd.DataFrame(record[name], columns=columns)
        for name, columns in SEARCH_COLUMNS.items()
        if record.get(name)
    }
