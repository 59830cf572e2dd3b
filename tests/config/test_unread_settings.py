"""A setting that a sweep would not read is refused, and what a sweep wrote down is read again."""

import json

import pytest

from stability.config.base import validate
from stability.config.sweep import SweepSpec
from tests.reading import read_spec

NONE_READS = "read by launcher={} only, and this is launcher={}; "


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["slurm.partition=gpu"],
            "slurm.partition=gpu is " + NONE_READS.format("slurm", "auto") + "add launcher=slurm, or leave it out",
        ),
        (
            ["launcher=serial", "slurm.cpus=2"],
            "slurm.cpus=2 is " + NONE_READS.format("slurm", "serial") + "add launcher=slurm, or leave it out",
        ),
        (
            ["slurm.setup=[module]"],
            "slurm.setup=('module',) is " + NONE_READS.format("slurm", "auto") + "add launcher=slurm, or leave it out",
        ),
        (
            ["launcher=serial", "ray.address=auto"],
            "ray.address=auto is " + NONE_READS.format("ray", "serial") + "add launcher=ray, or leave it out",
        ),
        (
            ["launcher=slurm", "ray.node_retries=3"],
            "ray.node_retries=3 is " + NONE_READS.format("ray", "slurm") + "add launcher=ray, or leave it out",
        ),
        (
            ["launcher=serial", "cpus_per_trial=2"],
            "cpus_per_trial=2 is " + NONE_READS.format("ray", "serial") + "add launcher=ray, or leave it out",
        ),
        (
            ["launcher=serial", "gpus_per_trial=0.5"],
            "gpus_per_trial=0.5 is " + NONE_READS.format("ray", "serial") + "add launcher=ray, or leave it out",
        ),
        (
            ["launcher=slurm", "gpus_per_trial=0"],
            "gpus_per_trial=0 is " + NONE_READS.format("ray", "slurm") + "give slurm.gpus=…, or leave it out",
        ),
        (
            ["launcher=slurm", "cpus_per_trial=1"],
            "cpus_per_trial=1 is " + NONE_READS.format("ray", "slurm") + "give slurm.cpus=…, or leave it out",
        ),
        (
            ["halving.first_step=10"],
            "halving.first_step=10 is search.first_step of search=asha, which is not chosen; add search=asha",
        ),
    ],
)
def test_what_the_chosen_launcher_does_not_read_is_refused_in_a_line(words, message):
    with pytest.raises(ValueError) as caught:
        read_spec("sweep", words)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["ray.node_retries=3"],
        ["launcher=serial", "devices_per_trial=2", "microbatch=1"],
        [
            "ray.address=auto",
            "ray.node_retries=3",
            "cpus_per_trial=2",
            "gpus_per_trial=0.5",
            "halving.reduction=3",
            "halving.first_step=10",
        ],
        ["launcher=slurm", "slurm.partition=gpu", "slurm.gpus=1", "slurm.setup=[module load cuda]"],
    ],
)
def test_what_is_read_is_taken_and_so_is_the_record_of_it(words):
    spec = read_spec("sweep", words)
    assert validate(SweepSpec, json.loads(json.dumps(spec.model_dump(mode="json")))) == spec
