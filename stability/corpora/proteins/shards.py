"""Structure files to shards, in parallel over the cores.

An interrupted preparation continues after its finished shards.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import multiprocessing
import os
import re
import signal
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from stability.corpora.io import step
from stability.corpora.io.files import suffix_of
from stability.corpora.proteins.npz import write_shard
from stability.corpora.proteins.parsing import SUFFIXES, parse
from stability.printable import line_of

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
FILES_PER_SHARD = 32
MOST_UNPACKED = 1 << 30  # bytes of one structure file
FEWEST_FILES = 2 * FILES_PER_SHARD  # below, starting worker processes costs more time than they save


class Member(NamedTuple):
    """A structure file: its name, and its path or its bytes from an archive."""

    name: str
    source: Path | bytes


def require_biotite() -> None:
    """Raise a ``RuntimeError`` if biotite is not installed."""
    if importlib.util.find_spec("biotite") is None:
        raise RuntimeError(
            "data=protein reads structures with the library biotite, which is not installed; pip install "
            "'stability-lab[protein]'"
        )


def shards(files: Sequence[Path], folder: Path, plddt: str, min_residues: int) -> Iterator[Path]:
    """Yield one shard for every 32 structure files, in their order.

    Existing shards in ``folder`` are not rebuilt.

    Args:
        files: structure files or tar archives.
        folder: folder of the shards.
        plddt: as in `parse`.
        min_residues: fewest residues with coordinates in a chain.

    Raises:
        ValueError: a tar archive is cut short or has no structure file.
        RuntimeError: a worker was killed, or biotite is not installed.
    """
    require_biotite()
    folder.mkdir(parents=True, exist_ok=True)
    num_processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    units = _units(files, folder)
    if num_processes == 1 or _few(files):
        for file, members in units:
            if members:
                write_unit(file, members, plddt, min_residues)
                step(len(members))
            yield file
        return
    # spawned: a forked child of a process with threads can hang
    with ProcessPoolExecutor(
        num_processes, mp_context=multiprocessing.get_context("spawn"), initializer=_serve
    ) as pool:
        yield from _write_in_parallel(pool, 2 * num_processes, units, plddt, min_residues)


def _serve() -> None:
    """Prepare a worker: ignore Ctrl-C, and exit with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent = multiprocessing.parent_process()
    assert parent is not None
    # without the thread, workers of a killed parent would wait for work forever
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()


def _exit_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _few(files: Sequence[Path]) -> bool:
    return len(files) < FEWEST_FILES and not any(
        suffix_of(file, TAR_SUFFIXES) and file.stat().st_size > 1 << 22 for file in files
    )


def _write_in_parallel(
    pool: ProcessPoolExecutor, most: int, units: Iterator[tuple[Path, list[Member]]], plddt: str, min_residues: int
) -> Iterator[Path]:
    """Write units in the pool, at most ``most`` at once; yield their files at the end."""
    made: list[Path] = []
    pending: dict[Future[int], Path] = {}
    try:
        for file, members in units:
            made.append(file)
            if members:
                pending[pool.submit(write_unit, file, members, plddt, min_residues)] = file
            while len(pending) >= most:
                _collect(pending)
        while pending:
            _collect(pending)
    except BrokenProcessPool:
        done = sum(file.is_file() for file in made)
        raise RuntimeError(
            f"a process that reads structures was killed (out of memory?) after {done:,} shards of {FILES_PER_SHARD} "
            "files; run again: it goes on from there"
        ) from None
    except BaseException:
        for future in pending:
            future.cancel()
        raise
    yield from made


def _collect(pending: dict[Future[int], Path]) -> None:
    done, _ = wait(pending, return_when=FIRST_COMPLETED)
    for future in done:
        del pending[future]
        step(future.result())


def write_unit(file: Path, members: Sequence[Member], plddt: str, min_residues: int) -> int:
    """Parse structure files into one shard.

    Args:
        file: the shard's path.
        members: the structure files.
        plddt: as in `parse`.
        min_residues: fewest residues with coordinates in a chain.

    Returns:
        The number of structure files.
    """
    chains, skipped = [], []
    for member in members:
        try:
            content = _unpack(member)
            found, reasons = parse(re.sub(r"\.gz$", "", member.name, flags=re.IGNORECASE), content, plddt, min_residues)
        except ValueError as error:
            skipped.append((member.name, str(error)))
            continue
        chains += found
        skipped += [(member.name, reason) for reason in reasons]
    write_shard(file, chains, skipped)
    return len(members)


def _unpack(member: Member) -> bytes:
    """Return a structure file's unpacked bytes.

    Raises:
        ValueError: the bytes cannot be read or are too many; a few words.
    """
    try:
        content = member.source.read_bytes() if isinstance(member.source, Path) else member.source
        if not member.name.lower().endswith(".gz"):
            return content
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            content = stream.read(MOST_UNPACKED + 1)
        if len(content) > MOST_UNPACKED:
            raise ValueError(f"unpacks to more than {MOST_UNPACKED:,} bytes, which no structure file has")
        return content
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ValueError("cut short or no gzip file") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None


def _units(files: Sequence[Path], folder: Path) -> Iterator[tuple[Path, list[Member]]]:
    """Yield (shard, its members), without members if the shard is finished."""
    held: list[Member] = []
    number = count = 0
    for file in files:
        for name, source in _sources(file):
            target = folder / f"shard-{number:06d}.npz"
            held.append(Member(name, b"" if is_whole(target) else source()))
            count += 1
            if count == FILES_PER_SHARD:
                yield target, [] if is_whole(target) else held
                held, count, number = [], 0, number + 1
    if held:
        target = folder / f"shard-{number:06d}.npz"
        yield target, [] if is_whole(target) else held


def is_whole(shard: Path) -> bool:
    """Return whether a shard was finished: it gets its name only then."""
    return shard.is_file()


def _sources(file: Path) -> Iterator[tuple[str, Callable[[], Path | bytes]]]:
    """Yield (name, function for the path or bytes) of each structure file, in order.

    ``file`` is one structure file or a tar archive.

    Raises:
        ValueError: an archive cannot be read or has no structure file.
    """
    if not suffix_of(file, TAR_SUFFIXES):
        yield file.name, lambda: file
        return
    is_empty = True
    with _refuse_damaged(file), tarfile.open(file) as archive:
        for entry in archive:
            name = Path(entry.name).name
            if entry.isfile() and not name.startswith(".") and suffix_of(Path(name), SUFFIXES):
                is_empty = False
                yield name, partial(_extract, file, archive, entry)
    if is_empty:
        raise ValueError(f"data.path: {file} holds no structure file; accepted are {', '.join(SUFFIXES)}")


def _extract(file: Path, archive: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    if entry.size > MOST_UNPACKED:
        raise ValueError(
            f"data.path: {file}: {entry.name} unpacks to {entry.size:,} bytes, more than a structure file has "
            f"({MOST_UNPACKED:,} at most); take it out"
        )
    with _refuse_damaged(file):
        stream = archive.extractfile(entry)
        assert stream is not None, "only files are extracted"
        return stream.read()


@contextmanager
def _refuse_damaged(file: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"data.path: {file} is cut short or no tar archive ({line_of(error)}); fetch or pack it again"
        ) from None
    except OSError as error:
        raise ValueError(f"data.path: cannot read {file}: {error.strerror or error}") from None
