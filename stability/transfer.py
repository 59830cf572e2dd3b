"""``python -m stability.transfer name=…``: predict the best learning rate at a size that was not swept."""

from __future__ import annotations

from stability.cli.compose import read
from stability.cli.entry import run_entry
from stability.cli.publish import collect_and_load
from stability.cli.words import Invocation
from stability.config.entries import TransferSpec
from stability.printable import print_text
from stability.startup import seldom_collected

HELP = """
python -m stability.transfer name=STUDY target.width=1024 [target.layers=12] [target.steps=20000] [key=value …]
python -m stability.transfer name=[STUDY,STUDY] target.…=…

Read studies that vary sizes (model.width=[64,128,256], model.layers, steps, batch), fit a law of the best learning rate
for each mechanism and parametrization, test it on the largest size, and predict the target's rate with an 80 % interval,
or say why it cannot be predicted. Several studies that share everything but their sizes make one law. Nothing is trained.
"""


def main(argv: list[str]) -> int:
    """Print the laws, their back-tests and the prediction."""
    spec = read(TransferSpec, Invocation.of(argv))
    from stability.runs.study import StudyFolder

    studies = [collect_and_load(study) for study in StudyFolder.find_all(spec.runs_dir, spec.name)]
    with seldom_collected():
        from analysis.sections.transfer import describe

        print_text(describe(studies, spec.target.list_given()))
    return 0


if __name__ == "__main__":
    run_entry(main, "transfer", HELP)
