"""A user's files: which ones a path names, and their bytes, unpacked."""

from __future__ import annotations

import difflib
import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path

from stability.corpora.io.progress import step

PACKED = {".gz": "gzip", ".zst": "zstd"}


def find_files(path: str, suffixes: tuple[str, ...], noun: str, other: tuple[str, tuple[str, ...]]) -> list[Path]:
    """Return the file, or a folder's files with one of ``suffixes``, sorted; hidden ones are left out, links are
    followed.

    Errors: ``ValueError`` for a path that is missing (with a near miss beside it), of another kind, unreadable, or a
    folder without any ``noun``.
    ``other``: the choice that reads other suffixes, and these: whoever gives such a file is told of it.
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
    """Say which choice reads one of the files; empty where none does."""
    choice, suffixes = other
    found = next((file for file in files if suffix_of(file, suffixes)), None)
    return "" if found is None else f"{before}{choice} reads {found.name}"


def _walk(root: Path) -> Iterator[Path]:
    """Yield every file below a folder that is not hidden, links followed once."""

    def refuse(error: OSError) -> None:
        raise ValueError(f"data.path: cannot read the folder {error.filename}: {error.strerror}")

    seen: set[str] = set()
    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=True):
        if os.path.realpath(folder) in seen:  # a link back up would be followed for ever
            subfolders.clear()
            continue
        seen.add(os.path.realpath(folder))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def suffix_of(file: Path, suffixes: tuple[str, ...]) -> str:
    """Return which of ``suffixes`` the name ends in, in either case; empty where in none."""
    return next((suffix for suffix in suffixes if file.name.lower().endswith(suffix)), "")


def origin_of(path: str, files: list[Path], what: str) -> str:
    """Return ``text of books.jsonl``, ``text of my_folder (3 files)``: names only, never where they lie."""
    root = Path(path).expanduser().resolve()
    return f"{what} of {root.name}" + (f" ({len(files):,} files)" if root.is_dir() else "")


def total_bytes(files: list[Path]) -> int:
    """Return the size of the files on disk in bytes, packed as they are."""
    return sum(file.stat().st_size for file in files if file.is_file())


class _Counted(io.FileIO):
    """A file that tells the progress bar what is read of it."""

    def readinto(self, buffer, /) -> int | None:
        num_bytes = super().readinto(buffer)
        step(0, num_bytes or 0)
        return num_bytes


# what a file raises that is cut short, damaged or not of its kind; gzip's own is an OSError
UNREADABLE = (EOFError, zlib.error, OSError)


@contextmanager
def located(reached: Callable[[], str]) -> Iterator[None]:
    """Tell within the block, which reads an `opened` file, what was ``reached`` when an error says that bytes end
    unexpectedly."""
    try:
        yield
    except UNREADABLE as error:
        error.add_note(reached())
        raise


@contextmanager
def opened(file: Path, key: str = "data.path") -> Iterator[BufferedIOBase]:
    """Yield the file's bytes, unpacked. Errors: ``ValueError`` where it cannot be opened, or proves cut short or not of
    its kind while it is read; ``key`` is the setting that named it.

    Who reads says how far he came by a note on the error (`located`).
    """
    kind = packing(file)
    try:
        with _Counted(file) as raw, _unpacked(io.BufferedReader(raw, 1 << 20), kind) as stream:
            yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _broken(key, file, kind, error) from None
    except OSError as error:
        if kind == "zstd" and error.errno is None:  # pyarrow's own
            raise _broken(key, file, kind, error) from None
        raise ValueError(f"{key}: cannot read {file}: {error.strerror or error}") from None


def packing(file: Path) -> str:
    """Return how a file is packed, "gzip", "zstd" or "" for not at all, by its name."""
    return next((kind for suffix, kind in PACKED.items() if file.name.lower().endswith(suffix)), "")


def _unpacked(raw: io.BufferedReader, kind: str) -> BufferedIOBase:
    if kind == "gzip":
        return gzip.GzipFile(fileobj=raw, mode="rb")
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
