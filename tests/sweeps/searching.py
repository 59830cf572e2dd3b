"""A sweep in rounds whose trials are fakes: what each run comes to is a function of its spec."""

import io
import math
import os
import signal
from dataclasses import asdict

from rich.console import Console

from stability.runs.study import StudyFolder
from sweeps.record import StudyRecord, words_of
from sweeps.search.rounds import make_search, run_rounds
from tests.reading import read_spec
from tests.sweeps import fakes
from tests.sweeps.real import TINY

WORDS = [word for word in TINY.split() if not word.startswith("lr=")]
EDGES = {"sa": -1.7, "sc": -1.23}  # log10 of the rate above which each spikes


class Sweep:
    """A parsed sweep, run by a fake as often as one likes; what it trained, and what it printed last."""

    def __init__(self, folder, *words):
        (folder / "text.txt").touch()
        searched = [word.removeprefix("search.space.").partition("=")[0] for word in words]
        own = [word for word in WORDS if word.partition("=")[0] not in searched]
        self.words = [*own, f"data.path={folder / 'text.txt'}", f"runs_dir={folder / 'runs'}", "name=study", *words]
        self.spec = read_spec("sweep", self.words)
        self.study, self.trained = StudyFolder.of(folder / "runs", "study"), []

    def run(self, train=None):
        self.console = Console(file=io.StringIO(), force_terminal=False, width=200)
        before = self.study.read() if self.study.file.exists() else {}
        self.search = make_search(self.spec, "f" * 64, before)

        origin = {"spec": self.spec.model_dump(mode="json"), "words": asdict(words_of(self.spec))}
        record = StudyRecord(self.study, self.spec, before, origin, started=0.0)
        outcome, trials = run_rounds(self.spec, self.search, record, console=self.console, run=train or self.train)
        record.write(trials, self.search.record())
        return outcome

    def train(self, trial):
        self.trained.append(trial.run_id)
        yield from along_a_valley(trial)

    @property
    def printed(self):
        return self.console.file.getvalue()


def along_a_valley(trial):
    """All of a run at once: what `outcome` makes of its spec, or a diverged one's first half."""
    yield
    verdict, nll = outcome(trial.spec)
    steps, last = trial.spec["steps"], trial.stop_at or trial.spec["steps"]
    for step in range(trial.directory.status()["step"] + 1, last + 1):
        if verdict != "diverged" or step < steps / 2:
            fakes.log_step(trial.directory, step, wall_s=0.1, val_nll=(nll or 9.0) + 1 / step)
    if last < steps and (verdict != "diverged" or last < steps / 2):
        trial.directory.set_status("stopped", step=last, reason="left", num_steps=steps)
    else:
        trial.directory.set_status(
            verdict, step=last, num_steps=steps, result={"val_nll": nll, "init_nll": 5.5, "unigram_nll": 3.0}
        )


def outcome(spec):
    """Verdict and NLL of a run: a valley around 10^-2.5, spiked above the mechanism's edge, diverged 0.2 decades above
    that; steps help, to a point."""
    x, edge = math.log10(spec["lr_peak"]), EDGES[spec["mechanism"]["name"]]
    if x > edge + 0.2:
        return "diverged", None
    return "spiked" if x > edge else "stable", 2.5 + 0.3 * (x + 2.5) ** 2 + 0.01 * spec["seed"] + 1e-4 * (
        spec["steps"] - 30
    ) ** 2


def cut_at(sweep, count):
    """A runner under which Ctrl-C comes in the middle of the run number ``count``."""

    def train(trial):
        if len(sweep.trained) == count:
            os.kill(os.getpid(), signal.SIGINT)
        yield
        yield from sweep.train(trial)

    return train
