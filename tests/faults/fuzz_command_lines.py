"""``python -m tests.faults.fuzz_command_lines [--lines=2000] [--seed=0]``: random command lines over every entry, in
  process and without training.

A line's words are keys, values and signs of the lines in ``tests/golden/messages.jsonl``, crossed, and the keys of the
entry's own config. Each line must end with exit code 0 or 2, with at most three lines on stderr that name a word as it
was written and that no library wrote, without a traceback, and leave nothing behind.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

from hydra.core.config_store import ConfigStore

from stability.cli.conf import is_group
from stability.cli.entry import run_entry
from tests.reading import compose

# What each entry needs to get as far as the work itself, which the sandbox replaces; for most a folder that is not there.
BASES: dict[str, tuple[str, ...]] = {
    "sweep": (),
    "hessian": ("ckpt=nowhere",),
    "probe": ("what=spectra", "ckpt=nowhere"),
    "generate": ("ckpt=nowhere", "num=2"),
    "report": ("name=nowhere",),
    "status": (),
    "train_tokenizer": (),
}
LAST: dict[str, tuple[str, ...]] = {"sweep": ("dry_run=true",)}
MESSAGES = Path(__file__).parents[1] / "golden" / "messages.jsonl"
SIGNED = re.compile(r"([+~]*)([^=]*)(=?)(.*)", re.DOTALL)
MOST_LINES = 3
MOST_CHARACTERS = 1200
LIMIT_S = 20  # of CPU; a line takes a tenth of a second
# how Hydra, OmegaConf, ANTLR, Python and numpy put it
FOREIGN = re.compile(
    "mismatched input|no viable|extraneous input|token recognition|Overflow|Config group override|full_key|object_type"
    "|hydra.cc|LexerNoViable|in struct|Traceback|multirun|NoneType|object has no|not supported between|embedded null"
    "|primitive type|Interpolation"
)
REACHED = re.compile(r"error: (no checkpoint at /|no study '.*' in /|no studies in /)", re.DOTALL)  # of `BASES`
SECRET = "a-secret-of-the-environment"


class Line(NamedTuple):
    """``argv`` of an entry, and the words of it that were drawn."""

    entry: str
    argv: tuple[str, ...]
    drawn: tuple[str, ...]


def line_of(entry: str, words: Sequence[str]) -> Line:
    """Return the line of some words: an entry's own before them, as far as they give none of the same key."""
    given = {word.lstrip("+").partition("=")[0] for word in words if "=" in word}
    base = [word for word in BASES[entry] if word.partition("=")[0] not in given]
    return Line(entry, (*base, *words, *LAST.get(entry, ())), tuple(words))


def draw(random: Random) -> Line:
    """Draw a command line of one to three words; most have one, so that what is said of it can be judged."""
    entry = random.choice(list(BASES))
    words = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        (sign, key, is_given, _), (*_, value) = (
            SIGNED.fullmatch(random.choice(_kept_words())).groups() for _ in range(2)
        )
        key = random.choice((key, *2 * [random.choice(_own_keys(entry))]))
        words.append(f"{sign}{key}{is_given}{value}" if is_given else f"{sign}{key}")
    return line_of(entry, words)


@cache
def _kept_words() -> list[str]:
    return [word for line in MESSAGES.read_text().splitlines() for word in json.loads(line)[1]]


@cache
def _own_keys(entry: str) -> list[str]:
    """Return every dotted key of an entry's composed config."""

    def below(values: dict[str, Any], prefix: str) -> Iterator[str]:
        for key, value in values.items():
            yield f"{prefix}{key}"
            if isinstance(value, dict):
                yield from below(value, f"{prefix}{key}.")

    return list(below(compose(entry, BASES[entry]), ""))


class Accepted(BaseException):
    """The line was understood: what comes next would be the work."""


class Outcome(NamedTuple):
    """What a line did: exit code (None: it raised), stderr and stdout, what was raised, changed files."""

    code: int | None
    err: str
    out: str
    raised: str
    written: list[str]


class Sandbox:
    """A folder with a home, a place for temporary files and a working directory, in which the entries run, their work
    replaced."""

    def __init__(self, root: Path):
        self.root, self.home, self.tmp, self.work = root, root / "home", root / "tmp", root / "a" / "b" / "c" / "work"
        self.torch = root / "torch"  # where torch makes a folder as soon as it is asked for a model's shapes
        for folder in (self.home, self.tmp, self.work, self.torch):
            folder.mkdir(parents=True)
        self.corpus = _corpus(root)
        self.before = self._snapshot()

    def _snapshot(self) -> dict[str, int]:
        return {str(path.relative_to(self.root)): path.lstat().st_mtime_ns for path in self.root.rglob("*")}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        places = {
            "HOME": self.home,
            "TMPDIR": self.tmp,
            "XDG_CACHE_HOME": self.home / "cache",
            "HF_HOME": self.home / "hf",
            "TORCHINDUCTOR_CACHE_DIR": self.torch,
        }
        environment = {key: str(value) for key, value in places.items()} | {"SECRET": SECRET, "HF_HUB_OFFLINE": "1"}
        before, limit = Path.cwd(), signal.signal(signal.SIGPROF, _too_long)
        stop = signal.getsignal(signal.SIGTERM)
        os.chdir(self.work)
        try:
            with (
                mock.patch.dict(os.environ, environment),
                mock.patch("tempfile.tempdir", str(self.tmp)),
                self._without_work(),
            ):
                yield
        finally:
            os.chdir(before)
            signal.signal(signal.SIGPROF, limit)
            signal.signal(signal.SIGTERM, stop)

    @contextlib.contextmanager
    def _without_work(self) -> Iterator[None]:
        """Nothing is trained, measured, drawn, asked over the network or prepared."""
        replaced: dict[str, Any] = {
            "stability.registry._plugins": {},
            "stability.corpora.cache.prepare": self._prepare,
            "stability.corpora.cache.prepare_for_plan": lambda part, cache_dir: (self._prepare(part, cache_dir), True),
            "sweeps.dry_run.describe": lambda *args: "a plan",
            "sweeps.launchers.ray.head.start_early": _never,
            "stability.sweep._run": _never,
            "stability.hessian._measure_hugging_face": _accept,
            "stability.probe._graph_frame": _accept,
            "stability.train_tokenizer._train": _never,
        }
        with contextlib.ExitStack() as stack:
            for name, value in replaced.items():
                stack.enter_context(mock.patch(name, value))
            # plugins of other tests in this process are no choices here
            repo = {key: value for key, value in ConfigStore.instance().repo.items() if key.startswith(("hydra", "_"))}
            stack.enter_context(mock.patch.object(ConfigStore.instance(), "repo", repo))
            yield

    def _prepare(self, part: Any, cache_dir: Path) -> Any:
        from stability.registry import Registry

        path = getattr(part.settings, "path", None)
        if Registry("data").load(part.name).corpus is not type(self.corpus) or (
            path is not None and Path(path).exists()
        ):
            raise Accepted
        if part.name != "stdlib":
            Registry("data").load(part.name).cache_key(part.settings)
        return self.corpus

    def run(self, line: Line) -> Outcome:
        """One line, as `python -m stability.<entry>` runs it."""
        module = importlib.import_module(f"stability.{line.entry}")
        out, err, raised, code = io.StringIO(), io.StringIO(), "", None
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            with (
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
                mock.patch.object(sys, "argv", [line.entry, *line.argv]),
            ):
                run_entry(module.main, line.entry, module.HELP)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        except Accepted:
            code = 0
        except BaseException:  # noqa: BLE001 - whatever gets this far is what is looked for
            raised = traceback.format_exc()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        after = self._snapshot()
        written = sorted(path for path in self.before.keys() | after.keys() if self.before.get(path) != after.get(path))
        self.before = after
        return Outcome(code, err.getvalue(), out.getvalue(), raised, written)


def _corpus(root: Path) -> Any:
    from stability.config.parts import Part, validate_settings
    from stability.corpora.cache import prepare

    page = root / "page.txt"
    page.write_text(
        "\n".join(
            f"a line of the page that stands for the library, number {number * number % 997}" for number in range(3000)
        )
    )
    part = Part(name="text", settings=validate_settings("data", "text", {"path": str(page)}))
    return prepare(part, root / "cache")


class _TookTooLong(BaseException):
    pass


def _too_long(number: int, frame: Any) -> None:
    raise _TookTooLong


def _never(*args: Any, **named: Any) -> None:
    raise AssertionError("a random line began to work")


def _accept(*args: Any, **named: Any) -> None:
    raise Accepted


def fault(line: Line, outcome: Outcome) -> str | None:
    """The kind of what is wrong with how a line ended, or None."""
    lines = outcome.err.splitlines()
    if outcome.raised:
        return f"raised {outcome.raised.strip().splitlines()[-1][:60]}"
    if outcome.written:
        return f"wrote {outcome.written[:2]}"
    if SECRET in outcome.err + outcome.out:
        return "told the environment"
    if outcome.code not in (0, 2):
        return f"exit code {outcome.code}"
    if outcome.code == 0:
        return f"said {lines[0][:60]!r} and went on" if lines else None
    if not 1 <= len(lines) <= MOST_LINES or len(outcome.err) > MOST_CHARACTERS:
        return f"{len(lines)} lines of {len(outcome.err)} characters"
    if re.search(r"[\x00-\x09\x0b-\x1f\x7f\u2028\u202e]", outcome.err):
        return "control characters"
    if foreign := FOREIGN.search(_without(outcome.err, line)):
        return f"a library's words: {foreign.group()}"
    if REACHED.match(outcome.err):  # the words were understood
        return None
    if "a value is missing; give " in outcome.err and any(is_group(_key_of(word)) for word in line.drawn):
        return None  # of what was chosen, or of what is no longer
    if re.search(r"needs \w+\.\w+=", outcome.err) and any(_key_of(word) == "study" for word in line.drawn):
        return None  # a preset that cannot do without something of the user's own, which the message names
    if not any(is_named(word, outcome.err) for word in line.drawn):
        return "no word named"
    return None


def _without(text: str, line: Line) -> str:
    for word in sorted(line.drawn, key=len, reverse=True):
        for said in (word, word.partition("=")[2], _key_of(word)):
            text = text.replace(said, "") if len(said) > 3 else text
    return text


def _key_of(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def is_named(word: str, text: str) -> bool:
    """Whether the key, or the group of settings that it lies in, stands in the text by itself (of a long one its
    beginning, of odd characters those before)."""
    key, value = _key_of(word), word.partition("=")[2]
    if start := _plain(key):
        holders = [".".join(start.split(".")[:depth]) for depth in range(1, start.count(".") + 1)]
        ends = [
            re.escape(start) + ("" if len(start) < len(key) else r"(?![a-z_0-9])"),
            *(rf"{re.escape(holder)}(?![a-z_0-9])" for holder in holders if holder),
        ]
        return re.search(rf"(?<![\w.])({'|'.join(ends)})", text) is not None
    return _plain(value) in text if _plain(value) else "'" in text


def _plain(text: str) -> str:
    """The first of its characters that a message shows as they are."""
    return re.match(r"[^\x00-\x1f\x7f\u2028\u202e\udc80\ufeff]{0,40}", text).group().strip()  # type: ignore[union-attr]


def storm(num_lines: int, seed: int) -> Iterator[tuple[Line, Outcome, str | None]]:
    """Draw and run lines; each with its outcome and its fault."""
    random = Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        sandbox = Sandbox(Path(folder).resolve())
        with sandbox.entered():
            for _ in range(num_lines):
                line = draw(random)
                outcome = sandbox.run(line)
                yield line, outcome, fault(line, outcome)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--lines", type=int, default=2000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--show", action="store_true", help="every line with what was said")
    asked = options.parse_args()
    kinds, codes = Counter(), Counter()
    for line, outcome, kind in storm(asked.lines, asked.seed):
        codes[outcome.code] += 1
        kinds.update([kind] if kind else [])
        if kind or asked.show:
            words = " ".join(repr(word)[:120] for word in line.drawn)
            print(
                f"{kind or 'fine'} | {line.entry} {words} | {outcome.raised[-700:] or outcome.err[:300]!r}",
                flush=True,
            )
    for kind, count in kinds.most_common():
        print(f"{count:5} {kind}")
    print(f"{sum(kinds.values())} of {asked.lines} lines failed (seed {asked.seed}); exit codes {dict(codes)}")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
