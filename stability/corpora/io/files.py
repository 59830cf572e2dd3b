"""Find a user's files by path, and read their unpacked bytes."""

from __future__ import annotations

import difflib
import gzip
import hashlib
import io
import lzma
import os
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path

from stability.corpora.io import step

PACKED = {".gz": "gzip", ".zst": "zstd", ".xz": "xz"}
LONGEST_LINE = 64 << 20  # bytes, unpacked: a whole line is in memory
MOST_NAMED = 3  # unread files of a folder named in the description


def find_files(path: str, suffixes: tuple[str, ...], noun: str, other: tuple[str, tuple[str, ...]]) -> list[Path]:
    """Return a file, or a folder's files with one of the suffixes, sorted.

    Hidden files are omitted; links are followed.

    Args:
        path: a file or folder.
        suffixes: accepted ends of names.
        noun: the kind of file, for messages.
        other: the setting for files with other suffixes, and these suffixes; the message recommends the setting if the
            path has such a file.

    Raises:
        ValueError: the path is missing (the message may suggest a similar one), unreadable, no file or folder, has
            another suffix, or is a folder without accepted files.
    """
    root = Path(path).expanduser()
    if root.is_file():
        if not suffix_of(root, suffixes):
            raise ValueError(
                f"data.path={path}: the name ends in none of {', '.join(suffixes)}; "
                f"{_advice([root], other) or 'rename or convert it'}"
            )
        return [root]
    if not root.exists():
        neighbours = (
            [file.name for file in root.parent.iterdir()]
            if root.parent.is_dir() and os.access(root.parent, os.R_OK)
            else []
        )
        close = difflib.get_close_matches(root.name, neighbours, n=1)
        raise ValueError(
            f"data.path={path}: no such file or folder"
            + (f"; did you mean '{root.parent / close[0]}'?" if close else "")
        )
    if not root.is_dir():
        raise ValueError(
            f"data.path={path}: neither a file nor a folder; give one of {', '.join(suffixes)} or a folder of them"
        )
    found = sorted(file for file in _walk(root) if suffix_of(file, suffixes))
    if not found:
        raise ValueError(
            f"data.path={path}: the folder holds no {noun}; accepted are "
            f"{', '.join(suffixes)}{_advice(_walk(root), other, '; ')}"
        )
    return found


def _advice(files: Iterable[Path], other: tuple[str, tuple[str, ...]], before: str = "") -> str:
    """Describe the setting that reads one of the files; empty if none does."""
    choice, suffixes = other
    found = next((file for file in files if suffix_of(file, suffixes)), None)
    return "" if found is None else f"{before}{choice} reads {found.name}"


def _walk(root: Path, *, is_strict: bool = True) -> Iterator[Path]:
    """Yield every file below a folder except hidden ones; links are followed once.

    An unreadable folder raises a ``ValueError`` if ``is_strict``, else it is skipped.
    """

    def refuse(error: OSError) -> None:
        raise ValueError(f"data.path: cannot read the folder {error.filename}: {error.strerror}")

    seen: set[str] = set()
    for folder, subfolders, names in os.walk(root, onerror=refuse if is_strict else None, followlinks=True):
        if os.path.realpath(folder) in seen:  # a link to a parent folder would never end
            subfolders.clear()
            continue
        seen.add(os.path.realpath(folder))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def suffix_of(file: Path, suffixes: tuple[str, ...]) -> str:
    """Return the matching suffix of a file's name in either case, or ""."""
    return next((suffix for suffix in suffixes if file.name.lower().endswith(suffix)), "")


def origin_of(path: str, files: list[Path], what: str) -> str:
    """Return ``text of books.jsonl`` or ``text of my_folder (3 files; left out: README.md)``.

    The text contains names only, no locations.

    Args:
        path: a file or folder.
        files: the files read.
        what: the kind of content, e.g. ``text``.
    """
    root = Path(path).expanduser()
    noun = "file" if len(files) == 1 else "files"
    counted = f" ({len(files):,} {noun}{describe_left_out(root, files)})" if root.is_dir() else ""
    return f"{what} of {root.resolve().name}{counted}"


def describe_left_out(root: Path, files: Iterable[Path]) -> str:
    """Return ``; left out: README.md, notes.doc``: a folder's files not among ``files``.

    The text has the first three and the number of others; it is empty if there are none. Hidden files do not count.
    """
    read = set(files)
    others = sorted(file.relative_to(root).as_posix() for file in _walk(root, is_strict=False) if file not in read)
    more = f" and {len(others) - MOST_NAMED:,} more" if len(others) > MOST_NAMED else ""
    return f"; left out: {', '.join(others[:MOST_NAMED])}{more}" if others else ""


def total_bytes(files: list[Path]) -> int:
    """Return the files' total size on disk in bytes, packed."""
    return sum(file.stat().st_size for file in files if file.is_file())


class _Counted(io.FileIO):
    """A file that reports its read bytes to the progress bar."""

    def readinto(self, buffer, /) -> int | None:
        num_bytes = super().readinto(buffer)
        step(0, num_bytes or 0)
        return num_bytes


# errors of files that are cut short, damaged or of another kind; gzip's own is an OSError
UNREADABLE = (EOFError, zlib.error, lzma.LZMAError, OSError)


@contextmanager
def add_location(reached: Callable[[], str]) -> Iterator[None]:
    """Add ``reached()`` as a note to read errors in the block.

    The block reads an `open_unpacked` file.
    """
    try:
        yield
    except UNREADABLE as error:
        error.add_note(reached())
        raise


@contextmanager
def open_unpacked(file: Path, key: str = "data.path") -> Iterator[BufferedIOBase]:
    """Yield a file's unpacked bytes.

    A reader adds its position to errors through `add_location`.

    Args:
        file: the file.
        key: the setting with its path, for messages.

    Raises:
        ValueError: the file cannot be opened, or is found cut short or of another kind while being read.
    """
    kind = find_compression(file)
    try:
        with _Counted(file) as raw, _unpack(io.BufferedReader(raw, 1 << 20), kind) as stream:
            yield stream
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise _broken(key, file, kind, error) from None
    except OSError as error:
        if kind == "zstd" and error.errno is None:  # pyarrow's own
            raise _broken(key, file, kind, error) from None
        raise ValueError(f"{key}: cannot read {file}: {error.strerror or error}") from None


def lines_of(stream: BufferedIOBase, file: Path, key: str = "data.path") -> Iterator[bytes]:
    """Yield a file's lines with their line ends.

    Args:
        stream: the bytes of an `open_unpacked` file.
        file: its path, for messages.
        key: the setting with its path, for messages.

    Raises:
        ValueError: a line is longer than 64 MB; at most so much is read into memory.
    """
    number = 0
    while line := stream.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise ValueError(
                f"{key}: {file}, line {number:,} is longer than {LONGEST_LINE >> 20} MB"
                f"{' unpacked' if find_compression(file) else ''}, the most that is read at once; cut it into several "
                "lines"
            )
        yield line


def make_truncation_error(file: Path, error: Exception) -> ValueError:
    """Return the error for an unreadable ``.npz`` file; ``error`` is the original one."""
    missing = error.strerror if isinstance(error, OSError) else "no file"
    size = f"{file.stat().st_size:,} bytes" if file.is_file() else missing
    return ValueError(f"data.path: {file} is cut short or no .npz file ({size}); fetch it again")


def refuse_larger_than_memory(file: Path) -> None:
    """Raise a ``ValueError`` if an ``.npz`` file unpacks to more than this machine's memory."""
    try:
        with zipfile.ZipFile(file) as archive:
            num_bytes = sum(member.file_size for member in archive.infolist())
    except (OSError, ValueError, zipfile.BadZipFile):  # no archive: the reader raises a better error
        return
    if num_bytes > machine_memory():
        raise ValueError(
            f"data.path: {file} unpacks to {num_bytes / 2**30:,.1f} GiB, more than the {machine_memory() / 2**30:,.1f} "
            "GiB of memory of this machine; cut it into several files"
        )


def machine_memory() -> int:
    """Return the machine's memory in bytes; unbounded if the system does not report a size."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else sys.maxsize


def find_compression(file: Path) -> str:
    """Return a file's compression by its name: "gzip", "zstd", "xz", or "" for none."""
    return next((kind for suffix, kind in PACKED.items() if file.name.lower().endswith(suffix)), "")


def _unpack(raw: io.BufferedReader, kind: str) -> BufferedIOBase:
    if kind == "gzip":
        return gzip.GzipFile(fileobj=raw, mode="rb")
    if kind == "xz":
        return lzma.LZMAFile(raw)
    if kind == "zstd":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), 1 << 16)
    return raw


def _broken(key: str, file: Path, kind: str, error: Exception) -> ValueError:
    reached = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return ValueError(f"{key}: {file} is cut short or no {kind} file ({error}{reached}); fetch or pack it again")


def sha256_of_file(file: Path) -> str:
    try:
        with open(file, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"data.path: cannot read {file}: {error.strerror}") from None
