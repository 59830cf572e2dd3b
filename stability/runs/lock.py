"""One process at a time works on a run, across sweeps and machines. No torch."""

from __future__ import annotations

import errno
import json
import os
import random
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from stability.runs.leftovers import name_temporary
from stability.runs.processes import Process

HEARTBEAT_S = 5.0  # interval of touching the claim, from a thread: a step may exceed any deadline
STALE_S = 120.0  # another machine's claim is dead if untouched for so long
ATTEMPTS, PAUSE_S = 8, 0.02
CLAIM = ".lock-"


class LostLock(RuntimeError):
    """Raised in a process without sign of life after another took over its run."""

    def __init__(self, folder: Path):
        super().__init__(
            f"{folder.name}: this machine stood still for so long that another took the run over; run the same "
            "command again"
        )


@dataclass(frozen=True)
class Owner:
    """The process that claims a run.

    Attributes:
        process: the process.
        launch: launch of a sweep that it works for, "" for none.
        folder: inode of the run's folder, to distinguish a claim from its copy; 0 in older claims.
    """

    process: Process
    launch: str = ""
    folder: int = 0

    def __str__(self) -> str:
        return str(self.process) if self.process.pid else f"a damaged lock file, which counts for {STALE_S:.0f} s"


UNKNOWN = Owner(Process("an unknown host", "", 0, ""))


class RunLock:
    """The exclusive right to write into a run's folder, from `acquire` to `release`.

    The end of the process also ends it.

    Protocol: a claim is a file ``.lock-<random>.json`` that names its process. `acquire` first writes its own claim,
    then lists the others. With no live one it holds the lock, else it withdraws its claim. At most one process holds
    the lock: of two claimants, the later reader finds the other's claim, written before that one's reading. A takeover
    uses the same steps. Names are never reused and dead processes stay dead, so anyone may remove a stale claim at any
    time. Two simultaneous claimants may both withdraw; they retry after random pauses.

    Death: on the same machine a process is dead if it is gone or its number belongs to a later one; this is detected at
    once. After a restart, or from another machine or container, a claim is dead if untouched for `STALE_S`, by the
    clock of the folder's file system, so that machines with different clocks agree. The same holds for a claim copied
    with its folder, even if its process lives. Within one launch, the launcher knows that a worker has ended: the next
    worker takes its claim without waiting.

    NFS needs no lock daemon, only its clients' default: a file created or renamed is visible to anyone who changes the
    folder and then lists it. Limit of every such lock: a process suspended for `STALE_S` (e.g. a virtual machine), with
    its run taken over meanwhile, finishes its current step before `refresh` reports the loss.
    """

    def __init__(self, folder: str | Path, launch: str = ""):
        self._folder = Path(folder)
        self._launch = launch
        self._claim: Path | None = None
        self._lost = False
        self._touched_at = 0.0
        self._released = threading.Event()

    def acquire(self) -> bool:
        """Claim the run and return whether this process now holds it.

        The folder is created if missing; stale claims are removed.
        """
        assert self._claim is None, "a lock is acquired once until it is released"
        self._folder.mkdir(parents=True, exist_ok=True)
        seen: set[Path] = set()
        for _ in range(ATTEMPTS):
            living = set(self._claims()[0])
            if living & seen:
                return False  # a claim seen twice is not being withdrawn: its owner holds the lock
            if not living:
                living = self._try_claim()
                if self._claim is not None:
                    return True
            seen = living
            time.sleep(PAUSE_S * (1 + random.random()))
        return False

    def refresh(self) -> bool:
        """Return whether the lock is still held; touch the claim at most every `HEARTBEAT_S`.

        Called after each step, it costs nothing in between.
        """
        claim = self._claim
        if claim is not None and not self._lost and time.monotonic() - self._touched_at > HEARTBEAT_S:
            self._touched_at = time.monotonic()
            try:
                os.utime(claim)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
                self._lost = claim is self._claim  # unless released meanwhile
        return not self._lost

    def run_steps(self, steps: Iterator[None]) -> Iterator[None]:
        """Yield the steps while the lock is held; closing this closes them.

        A lost lock raises `LostLock` inside the steps; they must not save then.
        """
        try:
            for _ in steps:
                if not self.refresh():
                    steps.throw(LostLock(self._folder))  # type: ignore[attr-defined]
                yield
        finally:
            steps.close()  # type: ignore[attr-defined]

    def release(self) -> None:
        self._released.set()
        claim, self._claim, self._lost = self._claim, None, False
        if claim is not None:
            claim.unlink(missing_ok=True)

    def owner(self) -> Owner | None:
        """Return the live owner of the run or of a pending claim, or None."""
        return next(iter(self._claims()[0].values()), None)

    def has_stale_claims(self) -> bool:
        """Return whether a dead process left a claim."""
        return bool(self._claims()[1])

    def _try_claim(self) -> set[Path]:
        """Claim, list other claims, hold or withdraw; return the others."""
        stale = self._claims()[1]
        try:
            claim = self._make_claim()
        except FileNotFoundError:  # the run's holder removed the temporary file as a leftover
            return set()
        living = set(self._claims()[0]) - {claim}
        if living:
            claim.unlink(missing_ok=True)
            return living
        for path in stale:
            path.unlink(missing_ok=True)
        self._claim, self._touched_at, self._released = claim, time.monotonic(), threading.Event()
        threading.Thread(
            target=self._keep_alive, args=(self._released,), name="heartbeat of a run's lock", daemon=True
        ).start()
        return set()

    def _make_claim(self) -> Path:
        claim = self._folder / f"{CLAIM}{secrets.token_hex(8)}.json"
        aside = name_temporary(claim)  # renamed when complete
        aside.write_text(json.dumps(asdict(Owner(Process.current(), self._launch, self._folder.stat().st_ino))))
        aside.replace(claim)
        return claim

    def _keep_alive(self, released: threading.Event) -> None:
        with suppress(OSError):  # the next step's refresh raises it again and can report it
            while not released.wait(HEARTBEAT_S) and self.refresh():
                pass

    def _claims(self) -> tuple[dict[Path, Owner], list[Path]]:
        """Return (live claims with their owners, stale claims)."""
        living, stale = {}, []
        for path in self._list_claims():
            try:
                owner = _read(path)
                if self._is_alive(path, owner):
                    living[path] = owner
                else:
                    stale.append(path)
            except FileNotFoundError:  # released or withdrawn meanwhile
                continue
        return living, stale

    def _list_claims(self) -> list[Path]:
        try:
            # a launch checks hundreds of runs per second, and Path objects are slow
            names = os.listdir(self._folder)  # noqa: PTH208
        except FileNotFoundError:
            return []
        return [self._folder / name for name in names if name.startswith(CLAIM) and name.endswith(".json")]

    def _is_alive(self, path: Path, owner: Owner) -> bool:
        lives = owner.process.lives
        # A different inode means a copied pool. A few file systems later give a folder another inode, so an apparent
        # copy still counts while it is touched.
        if lives is not None and not (lives and owner.folder not in (0, self._folder.stat().st_ino)):
            return lives
        if lives is None and self._launch and owner.launch == self._launch:
            return False
        # abs: a time far in the future is no sign of life either (the file system's clock was set back)
        return abs(_file_system_time(self._folder) - path.stat().st_mtime) < STALE_S


def _read(path: Path) -> Owner:
    """Parse a claim file; unknown owner if it is corrupt, as after a power failure."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        owner = Owner(Process(**values["process"]), values["launch"], values.get("folder", 0))
        return owner if _is_sound(owner) else UNKNOWN
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return UNKNOWN


def _is_sound(owner: Owner) -> bool:
    process = owner.process
    texts = (process.host, process.machine, process.started, owner.launch)
    numbers = (process.pid, owner.folder)
    return (
        all(isinstance(text, str) for text in texts)
        and all(type(number) is int and 0 <= number < 2**63 for number in numbers)
        and 0 < process.pid < 2**31
    )


def _file_system_time(folder: Path) -> float:
    """Return the folder's file-system time; this machine's if the folder is not writable."""
    probe = name_temporary(folder / f"clock-{secrets.token_hex(4)}")
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with suppress(OSError):
            probe.unlink()
