"""``python -m stability.train_tokenizer``: train an FSQ autoencoder of protein backbones.

It is measured on held-out chains, and their structures are written as mmCIF.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stability.cli.compose import read
from stability.cli.entry import check_writable, run_entry
from stability.cli.subjects import follow, run_locked
from stability.cli.words import Invocation
from stability.config.tokenizer import TokenizerRunSpec, TokenizerSpec
from stability.printable import print_text
from stability.runs.directory import RunDirectory

if TYPE_CHECKING:
    from stability.corpora.proteins.stored_chains import Chains

HELP = """
python -m stability.train_tokenizer [data=protein data.path=FOLDER_OR_FILE] [key=value …]

Train a structure tokenizer (encoder, finite scalar quantization, decoders) and measure it on held-out chains. Without
data.path: synthetic chains.

The tokenizer lies in runs/tokenizers/<id>; the id is made of all settings that decide the result. The same command goes
on where it was stopped (Ctrl-C saves first), and skips what is finished.
In Python: stability.structure.tokenizer.load_tokenizer("runs", "<id>"), then .encode(coords, mask) and .decode(tokens).
"""


def main(argv: list[str]) -> int:
    """Train the tokenizer unless it is trained, and report its measurement on held-out chains."""
    spec = read(TokenizerSpec, Invocation.of(argv))
    if spec.dry_run:
        from sweeps.tokenizer_plan import describe

        print_text(describe(spec.run("not read for a plan"), spec.plan_gpu))
        return 0
    check_writable("runs_dir", spec.runs_dir)
    check_writable("reports_dir", spec.reports_dir)  # now, not after an hour of training
    from stability.config.identity import tokenizer_id
    from stability.corpora.cache import prepare
    from stability.corpora.proteins.corpus import ProteinCorpus
    from stability.structure.tokenizer import directory_of
    from stability.structure.training import train_tokenizer

    corpus = prepare(spec.data, Path(spec.runs_dir) / "cache")
    if not isinstance(corpus, ProteinCorpus):
        raise ValueError(f"data={spec.data.name} holds no protein structures; give data=protein")
    print_text(corpus.describe(spec.positions))
    run = spec.run(corpus.fingerprint)
    directory = directory_of(spec.runs_dir, tokenizer_id(run))
    print_text(f"tokenizer {directory.run_id}: {directory.path}")
    train, held_out = corpus.chains("train"), corpus.chains("val")
    if directory.finished:
        print_text("skips training: finished already")
    else:
        _train(run, directory, train_tokenizer(run, directory, train, held_out, device=spec.device))
    status = directory.status()
    print_text(f"verdict: {status['state']} {status['reason']}".rstrip())
    if directory.finished and status["state"] != "diverged":
        _report(spec, directory, train, held_out)
    return 0


def _train(run: TokenizerRunSpec, directory: RunDirectory, steps: Iterator[None]) -> None:
    """Run the training's steps; the first Ctrl-C finishes the step, saves, and raises KeyboardInterrupt."""
    from sweeps.launchers import Interrupt

    with Interrupt() as interrupt:
        follow([interrupt.run_steps(run_locked(directory, steps))], [directory.run_id], [run.steps + run.atom_steps])
    if interrupt.requested:
        raise KeyboardInterrupt


def _report(spec: TokenizerSpec, directory: RunDirectory, train: Chains, held_out: Chains) -> None:
    """Measure the tokenizer unless done with these settings; print its table and write its figure."""
    from analysis.sections.structure import table, write
    from stability.structure.measure import is_measured, measure_tokenizer
    from stability.structure.tokenizer import load_tokenizer

    if not is_measured(directory, spec.rotations, spec.structures):
        tokenizer = load_tokenizer(spec.runs_dir, directory.run_id)
        steps = measure_tokenizer(
            tokenizer, directory, train, held_out, rotations=spec.rotations, structures=spec.structures
        )
        follow([run_locked(directory, steps)], [f"{directory.run_id} on held-out chains"], [0])
    print_text(table(directory.path / "results"))
    print_text(
        f"figure: {write(directory.path / 'results', Path(spec.reports_dir) / f'tokenizer_{directory.run_id}.pdf')}"
    )
    if spec.structures:
        print_text(f"structures: {directory.path / 'structures'}")


if __name__ == "__main__":
    run_entry(main, "train_tokenizer", HELP)
