"""Atomic parquet files, and fast joins of many small files through Arrow. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq

from stability.printable import line_of
from stability.runs.directory import describe_damage, rows_before_damage, write_atomically
from stability.runs.schema import TEXT, WHOLE

if TYPE_CHECKING:
    import pandas as pd  # a third of the start time of `status`, which reads no table

# size of a group of logs parsed at once: single files cost a parser start each, all at once too much memory
GROUP_BYTES = 32 * 2**20
TABLES_AT_ONCE = 256  # joined before the next are read


def write_parquet(frame: pd.DataFrame, path: Path, metadata: dict[str, str]) -> None:
    """Write a table atomically.

    Args:
        frame: the table.
        path: the file.
        metadata: strings to store in the file's schema.
    """
    table = pa.Table.from_pandas(frame, preserve_index=False)
    write_table(table.replace_schema_metadata({**(table.schema.metadata or {}), **metadata}), path)


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table with its metadata atomically."""
    content = pa.BufferOutputStream()
    pq.write_table(table, content, write_page_checksum=True)
    write_atomically(path, memoryview(content.getvalue()))


@contextmanager
def _name_damaged(path: Path) -> Iterator[None]:
    """Raise Arrow's errors of a damaged file as a ``ValueError`` with its name."""
    try:
        yield
    except FileNotFoundError:
        raise
    # Arrow raises several classes for damage, bare OSError among them.
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        why = line_of(error)
        raise ValueError(f"{path} is damaged ({why}); move it away and measure again") from None


def read_metadata(path: Path) -> dict[str, str]:
    """Return the strings in a file's schema.

    Raises:
        ValueError: the file is damaged; the message names it.
    """
    with _name_damaged(path):
        return {key.decode(): value.decode() for key, value in (pq.read_schema(path).metadata or {}).items()}


def has_columns(path: Path, columns: Sequence[str]) -> bool:
    """Return whether a file has all ``columns``; older tables may lack some."""
    with _name_damaged(path):
        return set(columns) <= set(pq.read_schema(path).names)


def has_rows(path: Path) -> bool:
    """Return whether a file has a row.

    Raises:
        ValueError: the file is damaged; the message names it.
    """
    with _name_damaged(path):
        return pq.read_metadata(path).num_rows > 0


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a small parquet file, or some of its columns.

    Raises:
        ValueError: the file is damaged; the message names it.
    """
    with _name_damaged(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        table = file.read(None if columns is None else list(columns), use_threads=False)
        table.validate(full=True)  # detects invalid UTF-8
        # pandas's metadata is redundant here, and raises many kinds of errors if damaged
    own = {key: value for key, value in (table.schema.metadata or {}).items() if key != b"pandas"}
    return table.replace_schema_metadata(own)


def concat_tables(tables: Iterable[pa.Table]) -> pa.Table | None:
    """Return the rows of all tables in one; None without rows.

    Columns missing in some tables are null there, and their types are widened.
    """
    # a table of fifty rows takes ten times the memory of its numbers: an iterator's tables are joined as they come
    joined: list[pa.Table] = []
    some: list[pa.Table] = []
    for table in tables:
        if len(table):
            some.append(table.replace_schema_metadata(None))
        if len(some) == TABLES_AT_ONCE:
            joined.append(pa.concat_tables(some, promote_options="permissive").combine_chunks())
            some = []
    filled = [*joined, *some]
    return pa.concat_tables(filled, promote_options="permissive") if filled else None


def join_tables(tables: Iterable[pa.Table], columns: Sequence[str]) -> pd.DataFrame:
    """Return all rows with ``columns``; columns missing in older tables are empty."""
    import pandas as pd

    found = concat_tables(tables)
    return pd.DataFrame(columns=list(columns)) if found is None else found.to_pandas().reindex(columns=list(columns))


def read_curves(
    logs: Sequence[tuple[str, Path]], columns: Sequence[str], left_out: dict[Path, str] | None = None
) -> pd.DataFrame:
    """Return the rows of many logs, ``run_id`` before the logged ``columns``.

    A column's type is that of `stability.runs.schema`, by default a number. Unlogged values are missing. A truncated
    last line is omitted; a missing log has no rows.

    Args:
        logs: pairs (run_id, path of metrics.jsonl or another log).
        columns: columns to read.
        left_out: receives the error of each damaged log by path; the rows before the damage are then used.

    Raises:
        ValueError: a log is damaged and ``left_out`` is None; the message names file and line.
    """
    schema = pa.schema([(name, _type(name)) for name in columns])
    ids, counts, tables = [], [], [schema.empty_table()]
    for group in _groups(logs):
        table = _parse_logs([data for _, _, data in group], schema)
        parts = [_read_alone(path, data, schema, left_out) for _, path, data in group] if table is None else [table]
        ids += [run_id for run_id, _, _ in group]
        counts += [data.count(b"\n") for _, _, data in group] if table is not None else map(len, parts)
        tables += parts
    owner = pa.array(ids, pa.string()).take(pa.array(np.repeat(np.arange(len(ids)), counts)))
    return pa.concat_tables(tables).add_column(0, "run_id", owner).to_pandas()


def _type(column: str) -> pa.DataType:
    return pa.string() if column in TEXT else pa.int64() if column in WHOLE else pa.float64()


def _groups(logs: Sequence[tuple[str, Path]]) -> Iterator[list[tuple[str, Path, bytes]]]:
    """Yield groups of (run_id, path, complete lines) of existing logs, about `GROUP_BYTES` each."""
    group, size = [], 0
    for run_id, path in logs:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        end = data.rfind(b"\n") + 1
        # zeros after the last line are damage, not a line being written
        group.append((run_id, path, data if b"\0" in data[end:] else data[:end]))
        size += len(data)
        if size > GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _parse_logs(logs: Sequence[bytes], schema: pa.Schema) -> pa.Table | None:
    """Return a table with one row per line, or None if it needs `_read_by_line`."""
    data = b"".join(logs)
    if not data:
        return schema.empty_table()
    options = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        table = pj.read_json(pa.BufferReader(data), parse_options=options)
    except pa.ArrowInvalid:
        return None
    is_whole = len(table) == data.count(b"\n") and ("step" not in schema.names or not table["step"].null_count)
    return table.select(schema.names) if is_whole else None


def _read_alone(path: Path, data: bytes, schema: pa.Schema, left_out: dict[Path, str] | None) -> pa.Table:
    """Return the table of one log after its group failed to parse."""
    table = _parse_logs([data], schema)
    if table is not None:
        return table
    table, damage = _read_by_line(path, schema)
    if damage:
        if left_out is None:
            raise ValueError(damage)
        rows = f"{len(table)} row{'' if len(table) == 1 else 's'}"
        left_out[path] = (
            f"{damage}; {rows} before that line {'is' if len(table) == 1 else 'are'} used; to train the run anew, move "
            f"{path.parent} away and run the sweep again"
        )
    return table


def _read_by_line(path: Path, schema: pa.Schema) -> tuple[pa.Table, str]:
    """Return a log's rows before its first damaged line, and the damage or ""; slow.

    Unlike Arrow, Python's reader accepts NaN.
    """
    whole, damage = rows_before_damage(path)
    rows = [{name: row.get(name) for name in schema.names} for row in whole]
    if not _find_refusal(rows, schema):
        return _table_of(rows, schema), damage
    # number of the first row that breaks the table
    number = bisect_left(range(len(rows)), True, key=lambda last: bool(_find_refusal(rows[: last + 1], schema)))
    why = _find_refusal(rows[: number + 1], schema)
    return _table_of(rows[:number], schema), describe_damage(path, number + 1, why)


def _find_refusal(rows: list[dict[str, Any]], schema: pa.Schema) -> str:
    """Return the reason why rows do not fit a schema, or ""."""
    try:
        _table_of(rows, schema)
    except (pa.ArrowException, OverflowError) as error:
        return str(error)
    return ""


def _table_of(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """Return rows as a table."""
    # cast raises on lossy conversion; from_pylist with a schema would round silently
    return pa.Table.from_pylist(rows).cast(schema) if rows else schema.empty_table()
