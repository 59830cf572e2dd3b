"""Compare a checkout with this one, run by run: ``python -m tests.proofs OTHER_CHECKOUT [--only=WORD,WORD] [--keep=FOLDER]``.

Both checkouts run the same short commands on this machine, each in its own process and folder, since the bytes of a
trained run differ between processors. Compared are, by command, exit code, stdout and stderr; by file of the pool, the
sha256 of what does not depend on the clock: metrics and other logs row by row less their times, each parquet column but
times, weights, specs, and tables as the report writes them. Prints each difference and each unexpected exit code; exits with 1 if there is one.

A checkout's own ``.venv/bin/python`` runs it, else this interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

SENTENCE = "the window of a stable step is wide where the graph is smooth and narrow where the scores are sharp"
MIXERS = "mechanism=[sa,gated_softmax,sw,gla,mamba2,deltanet]"
OPTIMIZERS = "adamw,sgd,adafactor,adan,ademamix,adopt,cautious_adamw,galore_adamw,lamb,lion,mars_adamw,muon"
OPTIMIZERS += ",prodigy,radam,schedulefree_adamw,shampoo,soap,sophia,turbo_muon"
ALPHA = "curvature.batch=4 curvature.recorded_steps=2 curvature.warmup_steps=1 curvature.warmup_batches=1"
TINY = (
    "data=text data.path=page.txt objective=mlm mechanism=sa model.layers=2 model.width=16 model.heads=2 model.positions=16"
    " steps=6 batch=4 evaluation.every_steps=3 evaluation.sequences=8 lr=[1e-2] seeds=1 launcher=serial device=cpu logger=files"
    f" report=false hessian=false {ALPHA}"
)
HESSIAN = (
    "batch=4 recorded_steps=1 warmup_steps=1 warmup_batches=1 phase=all device=cpu spectra.trace_products=6"
    " spectra.density_probes=1 spectra.density_products=4 spectra.profile_points=4 spectra.noise_batches=2"
    " spectra.noise_parts=2 measure=[alpha_max,critical_lr,profile,sharpness,density,blocks]"
)
ENTRIES = (
    "sweep",
    "hessian",
    "probe",
    "generate",
    "report",
    "status",
    "train_tokenizer",
    "dashboard",
    "transfer",
    "deploy",
    "infer",
    "embed",
    "describe",
    "web",
)


def sweep(name: str, words: str = "", left_out: str = "") -> str:
    """Return the command of a tiny sweep.

    Args:
        name: of the study.
        words: settings that replace those of ``TINY``, or come beside them.
        left_out: keys of ``TINY`` that the command does without.
    """
    settings = dict(word.split("=", 1) for word in [f"name={name}", *TINY.split(), *words.split()])
    return " ".join(["sweep", *(f"{key}={value}" for key, value in settings.items() if key not in left_out.split())])


QUICK = sweep(
    "quick", "mechanism=[sa,sc] lr=[1e-3,1e-2] steps=20 batch=8 evaluation.every_steps=10 hessian=true log.gradients=5"
)
COMMANDS = (
    *(f"{entry} -h" for entry in ENTRIES),
    f"{QUICK} dry_run=true",
    QUICK,
    QUICK,  # nothing is left to train
    "report name=quick format=files",
    "status",
    "status quick",
    f"hessian ckpt=runs/studies/quick {HESSIAN}",
    "probe what=spectra ckpt=runs/studies/quick device=cpu",
    "probe what=connectivity",
    sweep("optimizers", f"optimizer=[{OPTIMIZERS}]"),
    sweep("residuals", "hessian=true mechanism=[sa,sc] residual=[identity,hc,mhc,mhc_lite,ode]"),
    "probe what=streams ckpt=runs/studies/residuals device=cpu",
    sweep("norms", "norm=[layernorm,rmsnorm,dyt,derf] ffn=glu position=learned linear=bitnet schedule=wsd"),
    sweep("mixers", f"objective=ar {MIXERS} schedule=cosine"),
    "generate ckpt=runs/studies/mixers num=2 device=cpu",
    sweep("consensus", "mechanism=[sc,mix] clip_norm=0.1"),
    sweep("noise", "objective=score_entropy schedule=linear"),
    sweep("attended", "objective.context=4 cross=ca"),
    sweep("consented", "objective.context=4 cross=cc mechanism=sc"),
    sweep("recall", "objective=recall mechanism=[sa,gla] data=mqar model.positions=64", "data.path"),
    sweep("copied", "objective=recall data=copy model.positions=64", "data.path"),
    sweep("ablated", "hessian=true mechanism=sc ablate.sc.window=[2,4]"),
    sweep("left_early", "lr=[1e-4,1e-3,1e-2] steps=9 halving.reduction=3"),
    sweep("edge", "lr=edge lr.num=3", "lr"),
    sweep("diverged", "optimizer=sgd lr=[1e6] steps=12 hessian=true"),
)
REFUSED = (
    "report name=nowhere",
    "hessian ckpt=nowhere",
    "sweep mechanism=sq",
    "sweep steps=x",
    sweep("cut", "batch=6 devices_per_trial=4 dry_run=true"),
    sweep("causal", "objective=ar mechanism=sc"),
    sweep("taken", "linear=bitnet mechanism=sc"),
    sweep("contextless", "cross=ca"),
)
# of a row, a table or a json: what the clock or the process decides
CLOCKS = re.compile(
    r"(^|_)(s|seconds|at|time|times|pid|host|commit|dirty|hardware|command|memory_mb|tokens_per_s)$|"
    r"^(provenance|started|ended|launch|versions)$"
)
SKIPPED = re.compile(
    r"(^|/)cache/(answers|timings)/|(^|/)((provenance|published)\.json|timing\.jsonl|curvature_timing\.jsonl|.*\.(pdf|png|svg|html|lock))$|/lock"
)
# of a text: an amount that was measured, by its unit; clocks and dates; lines that a clock writes or is their subject
DURATION = re.compile(r"(\b\d[\d.,]*\s?(ms|s|min|h|MB|GiB)\b\s?)+|\b\d+:\d\d(:\d\d)?\b|\b20\d\d-\d\d-\d\d[T \d:.+]*")
CLOCK_LINES = re.compile(r"^(so far |α_max took |Time of a step over ).*\n?", re.MULTILINE)
CLOCK_COLUMN = re.compile(r"(?<=  )time of a step\b")
RULE = re.compile(r"[ ─━-]*[─━-][ ─━-]*")


class Answer(NamedTuple):
    """What a command printed, with times and folders replaced, and its exit code."""

    command: str
    code: int
    text: str


def without_times(value: Any) -> Any:
    """Return a JSON value without the entries that a clock or a process decides."""
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if not CLOCKS.search(key)}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


def digest(value: Any) -> str:
    """Return the first digits of a value's sha256, of its repr if it is no bytes; NaN equals NaN."""
    data = value if isinstance(value, bytes) else repr(value).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def described(path: Path) -> dict[str, str]:
    """Return digests of a file's parts: of a parquet's columns, of a log's rows together, else of the whole."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        table = pq.read_table(path)
        kept = [name for name in table.column_names if not CLOCKS.search(name)]
        types = {f"type of {name}": str(table.schema.field(name).type) for name in table.column_names}
        return types | {name: digest(table.column(name).to_pylist()) for name in kept}
    if path.suffix == ".jsonl":
        rows = [without_times(json.loads(line)) for line in path.read_text().splitlines()]
        return {f"row {number}": digest(row) for number, row in enumerate(rows)}
    if path.suffix == ".json":
        value = without_times(json.loads(path.read_text()))
        return {key: digest(part) for key, part in value.items()} if isinstance(value, dict) else {"": digest(value)}
    return {
        "": digest(plain(path.read_text()) if path.suffix in (".md", ".csv", ".tex", ".txt") else path.read_bytes())
    }


def plain(text: str, *folders: Path | str) -> str:
    """Return text without what a clock decides, folders and measured amounts replaced; a line's spaces count unless an
    amount stands in it, and a rule's length does not."""
    for folder in folders:
        text = text.replace(str(folder), "FOLDER")
    lines, column, rules = [], 0, 0  # where the column of times ends, and rules to the table's end
    for line in CLOCK_LINES.sub("", text).splitlines():
        if header := CLOCK_COLUMN.search(line):
            column, rules = header.end(), 2
        elif column and RULE.fullmatch(line):
            rules -= 1
            column = column if rules else 0
        elif column:
            line = re.sub(r"\S+( \S+)*", lambda cell: "TIME " if cell.end() == column else cell.group(), line)  # noqa: B023
        if DURATION.search(line) or "TIME " in line:
            line = re.sub(r"  +", "  ", DURATION.sub("TIME ", line)).replace(" in TIME ", " ").rstrip()
        lines.append("" if RULE.fullmatch(line) else line)
    return "\n".join(lines)


def files(folder: Path) -> dict[str, dict[str, str]]:
    """Return the digests of every file of a folder that is compared, by path."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: described(path) for name, path in names.items() if not SKIPPED.search(name)}


def work(only: str) -> None:
    """Run the commands in the working directory, and write answers and files beside it. ``only``: see `chosen`."""
    here = Path.cwd()
    words = SENTENCE.split()
    lines = [" ".join(words[(7 * i + j * j) % len(words)] for j in range(12)) for i in range(900)]
    (here / "page.txt").write_text("\n".join(lines))
    answers = []
    for command in chosen(only):
        started = time.monotonic()
        answer = run(command)
        answers.append(answer._replace(text=plain(answer.text, here, os.environ["PYTHONPATH"])))
        print(
            f"{time.monotonic() - started:5.1f} s, exit code {answer.code}: {command[:100]}",
            file=sys.__stderr__,
            flush=True,
        )
    (here.parent / f"{here.name}.json").write_text(json.dumps({"answers": answers, "files": files(here)}))


def chosen(only: str) -> list[str]:
    """Return the commands that name one of some words; ``""``: all."""
    return [command for command in (*COMMANDS, *REFUSED) if any(word in command for word in only.split(","))]


def run(command: str) -> Answer:
    """Run one command in this process as ``python -m stability.<entry>`` does in its own."""
    entry, *argv = command.split()
    out, code = io.StringIO(), 0
    sys.argv = [entry, *argv]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            runpy.run_module(f"stability.{entry}", run_name="__main__", alter_sys=False)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:  # noqa: BLE001 - a traceback is an answer, too, and the other commands go on
            code = -1
            print(traceback.format_exc())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return Answer(command, code, out.getvalue())


def start(checkout: Path, folder: Path, only: str) -> subprocess.Popen[bytes]:
    """Start a checkout's work.

    Args:
        checkout: whose code runs.
        folder: where it runs; it is made.
        only: see `chosen`.

    Returns:
        The process.
    """
    folder.mkdir()
    own = checkout / ".venv" / "bin" / "python"
    python = own if own.exists() else Path(sys.executable)
    # COLUMNS: tables are as wide in both
    environment = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "COLUMNS": "160", "WANDB_MODE": "disabled"}
    command = [str(python), "-P", str(Path(__file__).resolve()), "--work", f"--only={only}"]
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield a line or more for each command and file that differs.

    Args:
        before: answers and files of the other checkout.
        after: those of this one.
    """
    for (command, *old), (_, *new) in zip(before["answers"], after["answers"], strict=True):
        if old[0] != new[0]:
            yield f"{command}\n  exit code {old[0]} → {new[0]}"
        if old[1] != new[1]:
            lines = difflib.unified_diff(old[1].splitlines(), new[1].splitlines(), "before", "after", "", "", 0, "")
            yield "\n  ".join([command, *lines])
    for name in sorted(before["files"].keys() | after["files"].keys()):
        old, new = before["files"].get(name), after["files"].get(name)
        if old is None or new is None:
            yield f"{name}: only {'after' if old is None else 'before'}"
        elif parts := [part or "content" for part in old.keys() | new.keys() if old.get(part) != new.get(part)]:
            yield f"{name}: {', '.join(sorted(parts)[:12])}" + (f" and {len(parts) - 12} more" * (len(parts) > 12))


def find_unexpected(answers: Iterable[tuple[str, int, str]]) -> Iterator[str]:
    """Yield a line for each command that ended with another exit code than it should: a refused one proves nothing.

    Args:
        answers: command, exit code and text of each.
    """
    for command, code, text in answers:
        expected = 2 if command in REFUSED else 0
        if code != expected:
            yield f"{command}\n  exit code {code}, not {expected}: {text.strip().splitlines()[-1:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", type=Path, help="checkout that this one is compared with")
    parser.add_argument("--keep", type=Path, help="empty folder for both pools; default: a temporary one")
    parser.add_argument("--only", default="", help="commands that have one of these words in them, e.g. quick,status")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.only)
        return 0
    if options.other is None or not (options.other / "stability").is_dir():
        parser.error("give the folder of another checkout")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        both = {"before": options.other.resolve(), "after": Path(__file__).resolve().parents[1]}
        for name, checkout in both.items():  # one after the other: a core is enough
            if code := start(checkout, folder / name, options.only).wait():
                print(f"the work of {checkout} ended with exit code {code}")
                return 1
        records = [json.loads((folder / f"{name}.json").read_text()) for name in both]
    lines = list(differences(*records))
    for line in lines:
        print(line)
    unexpected = list(find_unexpected(records[1]["answers"]))
    for line in unexpected:
        print(line)
    print(
        f"{len(lines)} differences in {len(records[1]['answers'])} commands and {len(records[1]['files'])} files; {len(unexpected)} "
        f"unexpected exit codes; {time.monotonic() - started:.0f} s"
    )
    return 1 if lines or unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
