r"""Measure all that needs a GPU, in order of value, within a given time: ``python -m benchmarks.gpu_day minutes=25
[out=DIR] [wheels=DIR] [parts=tests,kernels,pairs,packing,study] [--rehearse]``.

Steps run one after another, each in a process of its own with its share of the time that is left. A table is appended
to ``out`` (benchmarks/results) row by row as it is measured, named by part, date and card; ``gpu_day_…txt`` lists what
ran, how each step ended, and the last lines of errors. A step that fails or exceeds its time never stops the next, and
a run that is cut (SIGTERM, Ctrl-C) ends its step and keeps every row. Even after SIGKILL all tables are whole.

This file needs Python's own library alone, the kernels of losses, band attention and AdamW torch and triton. Everything
else reads settings, and so needs pydantic; tests and the study need Hydra, too. Ray, wandb and optuna are not needed.
Where these are missing, a step is skipped and the command printed that fetches them as wheels (6 MB), to be run
beforehand with internet access; ``wheels=DIR`` then unpacks them for the steps alone and installs nothing:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        -c constraints.txt -d .whl pydantic pydantic_core annotated-types typing-inspection typing_extensions \
        hydra-core omegaconf jaxtyping wadler-lindig beartype pytorch_optimizer fla-core einops
    pip wheel --no-deps -c constraints.txt -w .whl antlr4-python3-runtime
    python -m benchmarks.gpu_day minutes=25 wheels=.whl

``--rehearse``: the same steps at tiny sizes on the CPU, kernels in Triton's interpreter, tables in
build/gpu_day_rehearsal. Their numbers have no meaning.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

FETCH = [line for line in (__doc__ or "").splitlines() if line.startswith("    ")]  # pip's commands, and the next run
ROOT = Path(__file__).resolve().parents[1]
RESULTS, REHEARSAL = ROOT / "benchmarks" / "results", ROOT / "build" / "gpu_day_rehearsal"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GRACE_S = 5.0  # between SIGINT, SIGTERM and SIGKILL
LEAST_S = 2.0  # a step is not started with less
SHOWN, SHOWN_LETTERS = 6, 200  # last lines of an error in the summary, and letters of a line
SETTINGS, TESTS = ("pydantic", "jaxtyping"), ("pydantic", "jaxtyping", "hydra", "omegaconf", "pytest", "yaml")
STUDY = (*TESTS[:4], "pandas", "pyarrow", "safetensors", "rich")
WANTED = (*TESTS, "pandas", "pyarrow", "safetensors", "rich", "triton", "fla", "pytorch_optimizer", "xdist")
# run by every interpreter that a step would run in: what it has, as JSON
PROBE = f"""
import importlib.util, json, platform
found = {{"python": platform.python_version(), "torch": None, "card": None, "cuda": False}}
found["missing"] = [name for name in {WANTED!r} if importlib.util.find_spec(name) is None]
try:
    import torch
    found["torch"], found["cuda"] = torch.__version__, torch.cuda.is_available()
    found["card"] = torch.cuda.get_device_name() if found["cuda"] else None
except ImportError:
    pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Step:
    """A command of its own process; its standard output is part of a table.

    Attributes:
        part: the table.
        label: name within the part.
        command: words after ``python``.
        rehearsal: the same at tiny sizes on a CPU.
        share: weight in the time that is left.
        needs: packages without which it is skipped.
    """

    part: str
    label: str
    command: tuple[str, ...]
    rehearsal: tuple[str, ...]
    share: float
    needs: tuple[str, ...] = ()


@dataclass
class Outcome:
    """How a step ended: "done", "failed", "out of time", "cut", "skipped", "running" or "waiting"."""

    step: Step
    state: str = "waiting"
    seconds: float = 0.0
    last: str = ""
    error: list[str] = field(default_factory=list)


class Cut(BaseException):
    """The run was told to end by a signal."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def _tests(label: str, what: Sequence[str], rehearsed: Sequence[str], share: float) -> Step:
    # the suite's own options import packages that only developers have
    options = ("-m", "pytest", "-q", "-rf", "--tb=line", "-o", "addopts=", "-p", "no:logging", "-p", "no:cacheprovider")
    more = ("--import-mode=importlib", "--strict-markers", "-m", "not slow")
    return Step("tests", label, (*options, *more, *what), (*options, *more, *rehearsed), share, TESTS)


def _kernels(name: str, share: float, needs: tuple[str, ...] = (), *, compiled: bool = False) -> Step:
    """Return a kernel's table: without torch.compile, which takes longer than all others; ``compiled``: with it."""
    command = ("-m", "benchmarks.kernels", "--kernels", name)
    if compiled:
        rehearsal = ("-c", f"print('rehearsed by {name}')")
        return Step("kernels", f"{name} compiled", command, rehearsal, share, ("triton", *needs))
    return Step("kernels", name, (*command, "--without", "compile"), (*command, "--smoke"), share, ("triton", *needs))


def _pairs(group: str, share: float, needs: tuple[str, ...] = ()) -> Step:
    command = ("-m", "benchmarks.training_pairs", "--groups", group)
    tiny = (*command, "--device", "cpu", "--smoke")
    return Step("pairs", group, (*command, "--device", "cuda"), tiny, share, (*SETTINGS, *needs))


def _packing(size: str, share: float) -> Step:
    command = ("-m", "benchmarks.gpu_packing")
    tiny = (*command, "--sizes", "smoke", "--device", "cpu", "--seconds", "0.2")
    if size != "nano":  # the same command at another size
        tiny = ("-c", "print('rehearsed by nano')")
    return Step("packing", size, (*command, "--sizes", size, "--device", "cuda"), tiny, share, SETTINGS)


# {scratch}: a folder of this run alone, with a page of text
_STUDY = """-m stability.sweep launcher=serial logger=files report=false name=gpu_day runs_dir={scratch}/runs seeds=1"""
_FULL_STUDY = "mechanism=[sa,sc] lr=[1e-3,1e-2,1e-1] steps=200 device=cuda"
_TINY_STUDY = """data=text data.path={scratch}/page.txt mechanism=sa lr=[1e-2] steps=2 batch=2 evaluation.every_steps=2
    evaluation.sequences=4 model.layers=1 model.width=16 model.heads=2 model.positions=16 device=cpu"""
# in order of value
STEPS = (
    _tests("kernels", ("tests/kernels",), ("tests/kernels/test_loss.py", "-k", "no_positions or no_column"), 5),
    _tests("mechanisms", ("tests/cuda/test_mechanisms.py",), ("tests/cuda/test_mechanisms.py", "-k", "sa or gla"), 2),
    _tests("resume", ("tests/cuda/test_resume.py",), ("tests/cuda/test_resume.py", "-k", "plain"), 2),
    _tests("alpha_max", ("tests/cuda/test_alpha_max.py",), ("tests/cuda/test_alpha_max.py", "-k", "sa"), 2),
    _kernels("consensus", 2, SETTINGS),
    _kernels("band_attention", 1.5),
    _kernels("streams", 1, SETTINGS),
    _kernels("loss", 1),
    _kernels("recurrent", 3, SETTINGS),
    _kernels("adamw_probe", 1),
    _pairs("impl", 4, ("triton",)),
    _pairs("fla", 2, ("triton", "fla")),
    _pairs("precision", 2),
    _pairs("compile", 3),
    _packing("nano", 4),
    _kernels("consensus", 3, SETTINGS, compiled=True),
    _kernels("streams", 2, SETTINGS, compiled=True),
    _kernels("loss", 2, compiled=True),
    _packing("1M", 2),
    _packing("10M", 2),
    _packing("50M", 2),
    Step(
        "study",
        "mini",
        (*_STUDY.split(), *_FULL_STUDY.split()),
        (*_STUDY.split(), *_TINY_STUDY.split()),
        2,
        STUDY,
    ),
)


class Day:
    """One run of the steps.

    Attributes:
        steps: the steps.
        seconds: time for all of them.
        out: folder of the tables.
        scratch: folder of this run alone; the steps import from its ``site``.
        is_rehearsal: whether the tiny commands are run.
    """

    def __init__(self, steps: Sequence[Step], seconds: float, out: Path, scratch: Path, *, is_rehearsal: bool):
        self.outcomes = [Outcome(step) for step in steps]
        self.out, self.scratch, self.is_rehearsal = out, scratch, is_rehearsal
        self.began, self.seconds = time.monotonic(), seconds
        self.environment = self._environment()
        self.found = self._probe()
        out.mkdir(parents=True, exist_ok=True)
        self.suffix = self._free_suffix()
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Run all steps; return the exit status: 0 if all are done, 1 if not, 128 + n after signal n."""
        try:
            for number in range(len(self.outcomes)):
                self._run(number)
        except Cut as signalled:
            self.write_summary()
            return 128 + signalled.number
        return int(any(outcome.state not in ("done", "skipped") for outcome in self.outcomes))

    def table(self, part: str) -> Path:
        return self.out / f"{part}_{self.suffix}.txt"

    def write_summary(self) -> None:
        """Replace the summary's file by the present state."""
        spent = time.monotonic() - self.began
        lines = [self._title("python -m benchmarks.gpu_day"), f"{spent:.0f} s of {self.seconds:.0f} s", ""]
        for outcome in self.outcomes:
            step = outcome.step
            took = f"{outcome.seconds:.0f} s" if outcome.state not in ("waiting", "skipped") else ""
            lines.append(f"{step.part:<10}{step.label:<16}{outcome.state:<13}{took:>6}  {outcome.last}".rstrip())
        for outcome in self.outcomes:
            if outcome.error:
                lines += ["", f"{outcome.step.part} {outcome.step.label}, {outcome.state}:"]
                lines += [f"  {line}" for line in outcome.error]
        if any(outcome.state == "skipped" for outcome in self.outcomes):
            lines += ["", "missing packages are fetched beforehand, with internet access, by:", *FETCH]
        path = self.table("gpu_day")
        beside = path.with_suffix(".part")
        beside.write_text("\n".join(lines) + "\n", encoding="utf-8")
        beside.replace(path)

    def _run(self, number: int) -> None:
        outcome = self.outcomes[number]
        left = self.seconds - (time.monotonic() - self.began)
        waiting = [each.step.share for each in self.outcomes[number:] if not self._missing(each.step)]
        missing = self._missing(outcome.step)
        if missing:
            outcome.state, outcome.last = "skipped", f"missing: {', '.join(missing)}; wheels=DIR, see below"
        elif left < LEAST_S:
            outcome.state, outcome.last = "out of time", "not started"
        else:
            self._execute(outcome, left * outcome.step.share / sum(waiting))
        self.write_summary()

    def _execute(self, outcome: Outcome, limit: float) -> None:
        step = outcome.step
        outcome.state = "running"
        self.write_summary()
        words = self._words(step)
        path, started = self.table(step.part), time.monotonic()
        with path.open("a", encoding="utf-8") as table, tempfile.TemporaryFile() as errors:
            if table.tell() == 0:
                table.write(self._title(f"python -m benchmarks.gpu_day, {step.part}") + "\n")
            table.write(f"\n## {step.label}: python {' '.join(words)}\n\n")
            table.flush()
            first = table.tell()
            try:
                self.process = subprocess.Popen(
                    [sys.executable, *words],
                    cwd=ROOT,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=table,
                    stderr=errors,
                    start_new_session=True,
                )
                outcome.state = "done" if self.process.wait(limit) == 0 else "failed"
            except subprocess.TimeoutExpired:
                outcome.state = "out of time"
            except Cut:
                outcome.state = "cut"
                raise
            finally:
                self._end_process()
                outcome.seconds = time.monotonic() - started
                printed = path.read_bytes()[first:].decode(errors="replace").splitlines()
                outcome.last = next((line.strip() for line in reversed(printed) if line.strip()), "")[:SHOWN_LETTERS]
                if outcome.state != "done":
                    errors.seek(0)
                    said = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
                    named = [line for line in printed if line.startswith(("FAILED", "ERROR"))]
                    outcome.error = [line[:SHOWN_LETTERS] for line in (*named, *said[-SHOWN:])]
                    table.seek(0, os.SEEK_END)
                    table.write(f"-- {outcome.state} after {outcome.seconds:.0f} s of {limit:.0f} s\n")

    def _words(self, step: Step) -> list[str]:
        """Return a step's command for this machine, without the interpreter."""
        given = step.rehearsal if self.is_rehearsal else step.command
        words = [word.replace("{scratch}", str(self.scratch)) for word in given]
        is_shared = step.part == "tests" and not self.is_rehearsal and "xdist" not in self.found["missing"]
        most = 16 if step.label == "kernels" else 4  # each worker imports everything and takes a context of the GPU
        return [*words, *(["-n", str(min(most, os.cpu_count() or 1))] if is_shared else [])]

    def _end_process(self) -> None:
        """Stop the step's whole process group.

        Interrupted first: pytest then lists the failures so far, and a benchmark stops its own processes.
        """
        process, self.process = self.process, None
        if process is None:
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                continue

    def _missing(self, step: Step) -> list[str]:
        return [name for name in step.needs if name in self.found["missing"]]

    def _environment(self) -> dict[str, str]:
        paths = [str(ROOT), str(self.scratch / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
        more = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        if self.is_rehearsal:
            more |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        return inherited | more

    def _probe(self) -> dict[str, Any]:
        command = [sys.executable, "-c", PROBE]
        found = subprocess.run(command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
        if found.returncode:
            raise SystemExit(f"python -m benchmarks.gpu_day: error: {found.stderr.strip().splitlines()[-1]}")
        values = json.loads(found.stdout)
        if not self.is_rehearsal and not values["cuda"]:
            print(
                "python -m benchmarks.gpu_day: error: torch sees no CUDA device; --rehearse needs none", file=sys.stderr
            )
            raise SystemExit(2)
        return values

    def _title(self, what: str) -> str:
        card = self.found["card"] or ("rehearsal on a CPU, numbers without meaning" if self.is_rehearsal else "no card")
        versions = f"Python {self.found['python']}, torch {self.found['torch']}"
        return f"{what}; {time.strftime('%Y-%m-%d %H:%M %Z')}; {card}; {versions}"

    def _free_suffix(self) -> str:
        """Return date and card, with a number if a table of this name exists: none is ever overwritten."""
        card = re.sub(r"^(NVIDIA|AMD|Tesla|GeForce|Instinct)\s+", "", self.found["card"] or "rehearsal").split()[0]
        plain = f"{time.strftime('%Y-%m-%d')}_{card.lower()}"
        number = 1
        while list(self.out.glob(f"*_{plain}{'' if number == 1 else f'_{number}'}.txt")):
            number += 1
        return plain if number == 1 else f"{plain}_{number}"


def unpack(wheels: Path, site: Path) -> None:
    """Write the files of every wheel of a folder into ``site``.

    Raises:
        ValueError: the folder has no wheel.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise ValueError(f"wheels={wheels} has no wheel (*.whl); the first lines of benchmarks/gpu_day.py fetch them")
    for wheel in found:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)


def read_words(argv: Sequence[str]) -> dict[str, Any]:
    """Return the words of a command line by name.

    Raises:
        ValueError: an unknown word or a value of another kind; one line.
    """
    values: dict[str, Any] = {"minutes": 25.0, "out": None, "wheels": None, "parts": None, "rehearse": False}
    for word in argv:
        name, _, value = word.partition("=")
        if word in ("--rehearse", "rehearse=true"):
            values["rehearse"] = True
        elif name in ("out", "wheels") and value:
            values[name] = Path(value).resolve()
        elif name == "minutes" and re.fullmatch(r"\d+(\.\d+)?", value) and float(value) > 0:
            values["minutes"] = float(value)
        elif name == "parts" and value:
            values["parts"] = value.split(",")
        else:
            raise ValueError(f"{word}: not one of minutes=25 out=DIR wheels=DIR parts=tests,kernels --rehearse")
    known = list(dict.fromkeys(step.part for step in STEPS))
    if unknown := [name for name in values["parts"] or () if name not in known]:
        raise ValueError(f"parts={','.join(unknown)}: choices are {', '.join(known)}")
    return values


def _cut(number: int, _: FrameType | None) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # once is enough, and the step's end is waited for
    raise Cut(number)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        words = read_words(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        print(f"python -m benchmarks.gpu_day: error: {error}", file=sys.stderr)
        return 2
    steps = [step for step in STEPS if words["parts"] is None or step.part in words["parts"]]
    out = words["out"] or (REHEARSAL if words["rehearse"] else RESULTS)
    for number in SIGNALS:
        signal.signal(number, _cut)
    scratch = Path(tempfile.mkdtemp(prefix="gpu_day_"))
    try:
        (scratch / "page.txt").write_text(
            "\n".join(f"Line {number} of {number * number % 97}." for number in range(4000))
        )
        if words["wheels"] is not None:
            unpack(words["wheels"], scratch / "site")
        day = Day(steps, 60 * words["minutes"], out, scratch, is_rehearsal=words["rehearse"])
        status = day.run()
        print(day.table("gpu_day").read_text(encoding="utf-8"), end="")
        return status
    except ValueError as error:
        print(f"python -m benchmarks.gpu_day: error: {error}", file=sys.stderr)
        return 2
    except Cut as signalled:
        return 128 + signalled.number
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
