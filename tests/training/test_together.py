"""What the run's own process tells the others, and what they do of it."""

from __future__ import annotations

import pytest
import torch

from stability.corpora.cache import load
from stability.training.devices.helper import call_in_turn
from stability.training.devices.one import OneDevice
from stability.training.devices.shared import Microbatches
from stability.training.replica import Replica
from stability.training.trainer import Trainer


class Overheard(OneDevice):
    """One device that keeps what another one would be told."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.told = []

    def tell(self, method, *numbers):
        self.told.append([method, *numbers])


def test_who_follows_what_is_told_goes_through_the_same_steps(lab):
    """Without a trainer, a log or a directory; the numbers of each step are all that it has to be told."""
    spec, devices = lab.spec(microbatch=3), Overheard()
    corpus, cpu = load(lab.cache, spec.data_fingerprint), torch.device("cpu")
    trainer = Trainer(spec, lab.directory(spec), corpus, cpu, devices)
    trainer.open()
    while trainer.step < spec.steps:
        trainer.advance()
    names = [name for name, *_ in devices.told]
    assert names.count("update") == spec.steps and {"measure", "gathered"} <= set(names) <= set(Trainer.TOGETHER)
    follower = Replica(spec, corpus, cpu)
    before = [parameter.detach().clone() for parameter in follower.parameters]
    call_in_turn(follower, devices.told)
    assert follower.val_nll == trainer.val_nll
    for parameter, start, own in zip(follower.parameters, before, trainer.parameters, strict=True):
        assert torch.equal(parameter, own)
        assert not torch.equal(parameter, start)


@pytest.mark.parametrize("name", ["_backward", "__init__", "spec", "nothing"])
def test_a_follower_does_nothing_else_that_it_is_told(lab, name):
    spec = lab.spec()
    follower = Replica(spec, load(lab.cache, spec.data_fingerprint), torch.device("cpu"))
    with pytest.raises(KeyError, match=name):
        call_in_turn(follower, [[name]])


def test_what_only_the_own_process_has_is_not_told(lab):
    spec, devices = lab.spec(), Overheard()
    replica = Replica(spec, load(lab.cache, spec.data_fingerprint), torch.device("cpu"), devices)
    replica.put(parameters=replica.model.state_dict())
    assert devices.told == [["put"]]


def test_helpers_with_the_whole_model_take_part_in_methods_of_a_replica_only():
    assert set(Microbatches.TOGETHER) == {Replica.update.__name__} <= set(Replica.TOGETHER)
