"""One process at a time works on a run, whichever sweep it belongs to and whichever machine it is on. No torch."""

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

from stability.runs.leftovers import temporary
from stability.runs.processes import Process

HEARTBEAT_S = 5.0  # a holder touches its claim this often, from a thread: a step may take longer than any deadline
STALE_S = 120.0  # a claim of another machine that was not touched for so long is a dead one
ATTEMPTS, PAUSE_S = 8, 0.02
CLAIM = ".lock-"


class LostLock(RuntimeError):
    """The error of a process whose run another process took over, since it gave no sign of life."""

    def __init__(self, folder: Path):
        super().__init__(
            f"{folder.name}: this machine stood still for so long that another took the run over; run the same "
            "command again"
        )


@dataclass(frozen=True)
class Owner:
    """The process that claims a run. ``launch``: the launch of a sweep that the process works for, "" for none;
    ``folder``: the inode of the run's folder, 0 in claims older than it, which tells a claim from its copy."""

    process: Process
    launch: str = ""
    folder: int = 0

    def __str__(self) -> str:
        return str(self.process) if self.process.pid else f"a damaged lock file, which counts for {STALE_S:.0f} s"


UNKNOWN = Owner(Process("an unknown host", "", 0, ""))


class RunLock:
    """The right to write into a run's folder, held from `acquire` to `release` or to the end of the process.

    A claim is a file of its own, ``.lock-<random>.json``, that names its process. To acquire is to put one's claim into
    the folder and *then* to look for others: whoever sees no living one holds the lock, else the claim is withdrawn. At
    most one holds it: of two that claim, the one that looks last sees the claim of the other, which stands from before
    that one looked. A takeover needs no more than that. Names are never used twice, and a dead process stays dead, so a
    stale claim can be removed by anyone at any time: no live one can be hit. Two that claim in the same moment may both
    withdraw; they try again after pauses of random length.

    Dead is, on the same machine, a process that is gone or whose number belongs to a later one: known at once. After a
    restart, or from another machine or container: one whose claim was not touched for `STALE_S`, by the clock of the
    file system that the folder is on, so that machines whose clocks differ agree. So is a claim that was copied with
    its folder, though its process lives. Within one launch, whose launcher
    knows that a worker has ended, its claim falls to the next worker without that wait.

    On NFS this needs no lock daemon, only what its clients do by default: a file created or renamed is there for
    whoever lists the folder after having changed it. What no lock of this kind can rule out: a process that stood still
    for `STALE_S` (a suspended virtual machine) while another machine took the run over, and then goes on, finishes the
    step it is at before `refresh` tells it.
    """

    def __init__(self, folder: str | Path, launch: str = ""):
        self._folder = Path(folder)
        self._launch = launch
        self._claim: Path | None = None
        self._lost = False
        self._touched_at = 0.0
        self._released = threading.Event()

    def acquire(self) -> bool:
        """Claim the run and return whether it is ours now; makes its folder where there is none, removes stale
        claims."""
        assert self._claim is None, "a lock is acquired once until it is released"
        self._folder.mkdir(parents=True, exist_ok=True)
        seen: set[Path] = set()
        for _ in range(ATTEMPTS):
            living = set(self._claims()[0])
            if living & seen:
                return False  # it stood for longer than a claim that is withdrawn
            if not living:
                living = self._try()
                if self._claim is not None:
                    return True
            seen = living
            time.sleep(PAUSE_S * (1 + random.random()))
        return False

    def refresh(self) -> bool:
        """Return whether the lock is still ours. Touches the claim at most every `HEARTBEAT_S`; called after each step,
        it costs nothing in between."""
        claim = self._claim
        if claim is not None and not self._lost and time.monotonic() - self._touched_at > HEARTBEAT_S:
            self._touched_at = time.monotonic()
            try:
                os.utime(claim)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
                self._lost = claim is self._claim  # unless it was released in this moment
        return not self._lost

    def during(self, steps: Iterator[None]) -> Iterator[None]:
        """Yield the steps, as long as the lock is held; closing this closes them. Once it is lost, `LostLock` is raised
        in them: they must not save then."""
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
        """Return who holds the run (or is about to); None where nobody alive does."""
        return next(iter(self._claims()[0].values()), None)

    def has_stale_claims(self) -> bool:
        """Return whether a dead process left a claim behind."""
        return bool(self._claims()[1])

    def _try(self) -> set[Path]:
        """Claim, look, and hold or withdraw; return what else was claimed."""
        stale = self._claims()[1]
        try:
            claim = self._make_claim()
        except FileNotFoundError:  # whoever held the run in this moment took it for a leftover
            return set()
        living = set(self._claims()[0]) - {claim}
        if living:
            claim.unlink(missing_ok=True)
            return living
        for path in stale:
            path.unlink(missing_ok=True)
        self._claim, self._touched_at, self._released = claim, time.monotonic(), threading.Event()
        threading.Thread(
            target=self._beat, args=(self._released,), name="heartbeat of a run's lock", daemon=True
        ).start()
        return set()

    def _make_claim(self) -> Path:
        claim = self._folder / f"{CLAIM}{secrets.token_hex(8)}.json"
        aside = temporary(claim)  # complete as soon as it has its name
        aside.write_text(json.dumps(asdict(Owner(Process.current(), self._launch, self._folder.stat().st_ino))))
        aside.replace(claim)
        return claim

    def _beat(self, released: threading.Event) -> None:
        with suppress(OSError):  # the next step's refresh meets it, too, where it can be reported
            while not released.wait(HEARTBEAT_S) and self.refresh():
                pass

    def _claims(self) -> tuple[dict[Path, Owner], list[Path]]:
        """Return (claims of the living with their owners, stale claims)."""
        living, stale = {}, []
        for path in self._listed():
            try:
                owner = _read(path)
                if self._is_alive(path, owner):
                    living[path] = owner
                else:
                    stale.append(path)
            except FileNotFoundError:  # released or withdrawn in this moment
                continue
        return living, stale

    def _listed(self) -> list[Path]:
        try:
            # a launch looks at hundreds of runs each second, and Path objects are slow
            names = os.listdir(self._folder)  # noqa: PTH208
        except FileNotFoundError:
            return []
        return [self._folder / name for name in names if name.startswith(CLAIM) and name.endswith(".json")]

    def _is_alive(self, path: Path, owner: Owner) -> bool:
        lives = owner.process.lives
        # the pool was copied, and the claim with it; a few file systems give a folder another inode later, so that
        # what looks like a copy still counts while it is touched
        if lives is not None and not (lives and owner.folder not in (0, self._folder.stat().st_ino)):
            return lives
        if lives is None and self._launch and owner.launch == self._launch:
            return False
        # a time far ahead is no sign of life either: the file system's clock was set back
        return abs(_file_system_time(self._folder) - path.stat().st_mtime) < STALE_S


def _read(path: Path) -> Owner:
    """Return the owner that a claim names; one that nobody can see where the file is damaged, as after a power
    failure."""
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
    """Return now, by the clock that dates the files of a folder; by this machine's where nothing can be written."""
    probe = temporary(folder / f"clock-{secrets.token_hex(4)}")
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with suppress(OSError):
            probe.unlink()
