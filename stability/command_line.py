"""What the entries share: Hydra composes, `config.parse` validates, errors become two lines and exit code 2."""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from stability.choices import AXES, conf_dir, defaults
from stability.config import ModelSpec, parse
from stability.imports import uncollected
from stability.mistakes import check_words, explained, printable
from stability.places import places_in, quoted
from stability.registry import Registry, add_plugin
from stability.runs.directory import RunDirectory
from stability.runs.lock import RunLock
from stability.runs.study import StudyFolder

HESSIAN_KEYS = ("ckpt", "hf", "data", "lr", "positions", "device")  # of conf/hessian.yaml; its other keys are the protocol's
# keys that change where or how a sweep runs, not what it is: they never enter its name
LABELS = ("name", "runs_dir", "reports_dir", "launcher", "logger", "device", "dry_run", "report", "cpus_per_trial", "gpus_per_trial", "plugins", "study")
LABELS += ("retry", "search.num", "search.batch")  # how far a sweep goes
OF_EVERY_MODEL = tuple(f"model.{key}" for key, field in ModelSpec.model_fields.items() if not field.is_required())
LAUNCHERS = ("ray.", "slurm.", "devices_per_trial", "shard_parameters")  # their settings, likewise
CHOICES = (*AXES, "model", "objective", "data", "schedule", "lr", "search")
PRESET_ROOT = "sweep"  # the one entry that has presets, in conf/study
USAGE = 2


def run_entry(main: Callable[[list[str]], int], help_text: str) -> None:
    """Run an entry's ``main`` on the command line: ``-h``, and what the user or the machine got wrong as two lines with exit code 2."""
    argv = sys.argv[1:]
    if any(flag in argv for flag in ("-h", "--help", "help")):
        print(help_text.strip())
        sys.exit(0)
    signal.signal(signal.SIGTERM, _stop)
    atexit.register(gc.freeze)  # else the interpreter looks through all of torch for garbage before it ends
    try:
        sys.exit(main(argv))
    except (ValueError, RuntimeError) as error:
        print(f"error: {printable(str(error), argv)}", file=sys.stderr)
        sys.exit(USAGE)
    except BrokenPipeError:  # whoever read our output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # an unwritable folder, a full disk
        print("error: " + printable(f"{error.strerror or error}: {error.filename or ''}", argv), file=sys.stderr)
        sys.exit(USAGE)
    except KeyboardInterrupt as stop:
        print("stopped; the same command goes on from here", file=sys.stderr)
        sys.exit(128 + (stop.args[0] if stop.args else signal.SIGINT))


def _stop(number: int, frame: FrameType | None) -> None:
    """SIGTERM, from `kill` or a machine that shuts down, ends an entry as Ctrl-C does. (A sweep's launch has a handler of its own, `sweeps.interrupt`.)"""
    raise KeyboardInterrupt(number)


def read_spec(kind: str, argv: Sequence[str], into: str | None = None, *, composed: Callable[[dict[str, Any]], None] = lambda values: None) -> Any:
    """Command line → validated spec. ``into``: the field that takes the keys which the root yaml writes flat (see conf/hessian.yaml). ``composed``: told
    what Hydra composed, before it is validated, which imports torch."""
    with uncollected():
        return _read_spec(kind, argv, into, composed)


def _read_spec(kind: str, argv: Sequence[str], into: str | None, composed: Callable[[dict[str, Any]], None]) -> Any:
    store_plugins(argv)
    values = compose(kind, argv)
    if kind == "sweep" and values.get("name") is None:
        values["name"] = study_name(argv)
    if into is not None:
        own = {key: values[key] for key in HESSIAN_KEYS if key in values}  # data and lr are there where they were chosen
        values = own | {into: {key: value for key, value in values.items() if key not in HESSIAN_KEYS}}
    composed(values)
    try:
        return parse(kind, values)
    except ValueError as error:  # the keys are written without `into`
        raise ValueError(str(error) if into is None else re.sub(rf"(?m)^{into}\.", "", str(error))) from None


def compose(root: str, argv: Sequence[str]) -> dict[str, Any]:
    """The plain dict that ``conf/<root>.yaml`` and the overrides make. Errors: ``ValueError`` in one or two lines."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    check_words(argv, root, hydra_overrides)
    _refuse_repetitions(argv)
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = hydra_compose(root, overrides=hydra_overrides(argv))
            if anew := _chosen_anew(root, argv):
                own = _without_the_preset(root, argv, anew)
                for group in anew:  # of an axis, the parts that are still chosen keep what the preset says of them
                    config[group] = {name: config[group][name] for name in own[group]} if group in AXES else own[group]
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:  # ValueError: Hydra's own, e.g. for ~model=7
        raise ValueError(explained(error, root, argv, hydra_overrides)) from None


def _refuse_repetitions(argv: Sequence[str]) -> None:
    """``residual=[hc,hc]``, of which Hydra would make one without a word."""
    for axis, value in _given(argv).items():
        names = re.findall(r"[^\[\],\s'\"]+", value) if axis in AXES else []
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise ValueError(f"{axis}={value}: {repeated[0]} is named {names.count(repeated[0])} times; give each once")


def _chosen_anew(root: str, argv: Sequence[str]) -> list[str]:
    """The groups of which the command line takes another choice than the preset does, and the axes that it names."""
    given = _given(argv)
    named = [group for group in CHOICES if group in given]
    if root != PRESET_ROOT or not named:
        return []
    preset = defaults(root) | defaults(f"study/{given.get('study') or defaults(root)['study']}")
    return [group for group in named if group in AXES or given[group] != preset[group]]


def _given(argv: Sequence[str]) -> dict[str, str]:
    """The words by key, as Hydra gets them."""
    return dict(word.split("=", 1) for word in hydra_overrides(argv) if "=" in word)


def _without_the_preset(root: str, argv: Sequence[str], groups: Sequence[str]) -> Any:
    """The settings of ``groups``, their own yamls' and the command line's alone."""
    from hydra import compose as hydra_compose

    words = [word for word in hydra_overrides(argv) if _key(word).split(".")[0] in groups]
    return hydra_compose(root, overrides=["~study", *words])


def _key(word: str) -> str:
    """``mechanism.sc.window`` of ``++mechanism.sc.window=4``."""
    return word.lstrip("+~").partition("=")[0]


def store_plugins(argv: Sequence[str]) -> None:
    """Make ``plugins=[my_pkg.my_mechanism]`` known to the registry, and its Config's defaults to Hydra, so that it is chosen like a yaml of ours."""
    from hydra.core.config_store import ConfigStore

    listed = next((word.partition("=")[2] for word in argv if word.startswith("plugins=")), "[]")
    if not re.fullmatch(r"\s*\[.*\]\s*|null", listed, re.DOTALL):
        raise ValueError(f"plugins={listed}: must be a list of modules, e.g. plugins=[my_pkg.my_mechanism]")
    for module in re.findall(r"[^\s,\[\]'\"]+", listed.removeprefix("null")):
        family, name = add_plugin(module)
        exported = Registry(family).load(name)
        group = "cross" if getattr(exported, "cross", False) else {"data": "data"}.get(family, family.removesuffix("s"))
        fields = exported.Config.model_fields
        node = {key: "???" if field.is_required() else field.get_default(call_default_factory=True) for key, field in fields.items()}
        named = node if group in AXES else {"name": name, **node}
        ConfigStore.instance().store(group=group, name=name, node=named, package=f"{group}.{name}" if group in AXES else group)


def hydra_overrides(argv: Sequence[str]) -> list[str]:
    """The argv shim: ``lr=1e-3`` and ``lr=[…]`` choose conf/lr/values.yaml, paths are quoted, ``ablate.…``, ``search.space.…`` and what
    a model's yaml may leave to its default are added; everything else passes unchanged."""
    overrides: list[str] = []
    for word in argv:
        key, _, value = word.partition("=")
        if key == "lr" and re.match(r"^([\[\d.+-]|nan$|inf$)", value):
            overrides += ["lr=values", f"lr.values={value if value.startswith('[') else f'[{value}]'}"]
        elif key.startswith(("ablate.", "search.space.")) or key in OF_EVERY_MODEL:  # the parts' own, which no root yaml can list; or in few of conf/model
            overrides.append(f"++{word}")
        elif (whole := quoted(key, value)) is not None:
            overrides.append(f"{key}={whole}")
        else:
            overrides.append(word)
    return overrides


def study_name(argv: Sequence[str]) -> str:
    """The preset's name where nothing else was asked for, else a name made from the overrides: ``mechanism=sc lr=range`` → ``sc-range``."""
    given: dict[str, str] = {}
    for word in argv:
        key, _, value = word.lstrip("+~").partition("=")
        given[key] = value
    asked = [_word(key, value) for key, value in given.items() if key not in LABELS and not key.startswith(LAUNCHERS)]
    words = ([given.get("study", "quickstart")] if "study" in given or not asked else []) + asked
    return "-".join(words)[:100].strip("-._+=") or "sweep"


def _word(key: str, value: str) -> str:
    is_place = places_in(key) is not None
    value = Path(value).name.split(".")[0] if is_place else value
    value = re.sub(r"[^A-Za-z0-9._+-]+", "", value.replace(",", "+"))
    return value if key in CHOICES or is_place else f"{key}{value}"


def publish(study: StudyFolder, reports_dir: str | None, phases: Sequence[str] = ("terminal",), *, unless_same: bool = False) -> None:
    """Collect the runs into parquet, print the tables (α_max of the phases' checkpoints among them), write the PDF. With ``unless_same`` all that is
    only printed where no run, table or line of our code has changed since it was last done: drawing takes longer than recognising 200 runs."""
    from stability.runs.published import Published

    pdf = None if reports_dir is None else Path(reports_dir) / f"{study.path.name}.pdf"
    published = Published(study, pdf, phases, _drawing_code())
    if unless_same and (text := published.summary()) is not None:
        print(text)
        if pdf is not None:
            print(f"report: {pdf}, nothing has changed since it was made")
        return
    with uncollected():
        from analysis.report import build, summary
        from stability.runs.results import collect, write

    write(collect(study.path), study.results)
    print(text := summary(study.path, phases))
    if pdf is not None:
        print(f"report: {build(study.path, pdf.parent)}")
    published.record(text)


def _drawing_code() -> list[Path]:
    """The source of `analysis`, not imported, and of the package that collects."""
    package = Path(__file__).resolve().parent
    return [*(package.parent / "analysis").glob("*.py"), *(package / "runs").glob("*.py")]


def with_verdict(directories: Sequence[RunDirectory]) -> list[RunDirectory]:
    """The runs that reached their verdict; how many did not is printed. ``ValueError`` where that is the only one."""
    unfinished = [directory for directory in directories if not directory.finished]
    if unfinished and len(directories) == 1:
        raise ValueError(f"{unfinished[0].run_id} is {unfinished[0].status()['state']}; run its sweep to the end first")
    if unfinished:
        print(f"leaves out {len(unfinished)} of {len(directories)} runs, which have not reached their verdict")
    return [directory for directory in directories if directory.finished]


def follow(tasks: Iterable[Iterator[None]], labels: Sequence[str], lengths: Sequence[int]) -> None:
    """Run the tasks one after another under one bar or, where the output is no terminal, with a line for each that is done. A task may take fewer
    steps than planned (no paper state for SGD, no checkpoint)."""
    from rich import get_console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    named = ((f"{number}/{len(labels)} {label}", steps) for number, (steps, label) in enumerate(zip(tasks, labels, strict=True), 1))
    if not get_console().is_terminal:
        _follow_in_lines(named)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} steps"), TimeRemainingColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=sum(lengths), visible=bool(lengths))
        for number, (name, steps) in enumerate(named, 1):
            progress.update(bar, description=name)
            for _ in steps:
                progress.advance(bar)
            progress.update(bar, completed=sum(lengths[:number]))


def locked(directory: RunDirectory, steps: Iterator[None]) -> Iterator[None]:
    """What writes into a run's folder, under the run's lock; nothing, and a line, where another process works on the run."""
    lock = RunLock(directory.path)
    if not lock.acquire():
        print(f"leaves out {directory.run_id}: {lock.owner() or 'another process'} works on it; the same command does the rest later")
        return
    try:
        yield from lock.during(steps)
    finally:
        lock.release()


def _follow_in_lines(named: Iterable[tuple[str, Iterator[None]]]) -> None:
    """A bar is drawn over itself, which a file or a CI log cannot show."""
    start = time.monotonic()
    for name, steps in named:
        for _ in steps:
            pass
        print(f"{name}, {time.monotonic() - start:.0f} s", flush=True)


def check_writable(key: str, folder: str) -> None:
    """Leave nothing behind. Errors: ``RuntimeError`` where ``key=folder`` can neither be written to nor made."""
    try:
        nearest = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise RuntimeError(f"{key}={folder}: nothing can be written there ({error.strerror or error}); give a folder of your own") from None
