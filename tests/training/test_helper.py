"""What the run's own process tells the others, and what they do of it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from stability.corpora.cache import load
from stability.training import loop
from stability.training.devices import OneDevice
from stability.training.devices.helper import follow
from stability.training.devices.shared import Microbatches
from stability.training.run import Trainer
from stability.training.step import Replica


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
    list(loop.train(trainer.directory, nullcontext(trainer)))
    names = [name for name, *_ in devices.told]
    assert names.count("train_step") == spec.steps and {"measure", "gather"} <= set(names) <= set(Replica.FOLLOWED)
    follower = lab.replica(spec)
    before = [parameter.detach().clone() for parameter in follower.parameters]
    follow(follower, devices.told)
    assert follower.val_nll == trainer.val_nll
    for parameter, start, own in zip(follower.parameters, before, trainer.parameters, strict=True):
        assert torch.equal(parameter, own)
        assert not torch.equal(parameter, start)


@pytest.mark.parametrize("name", ["_backward", "__init__", "spec", "nothing"])
def test_a_follower_does_nothing_else_that_it_is_told(lab, name):
    with pytest.raises(KeyError, match=name):
        follow(lab.replica(lab.spec()), [[name]])


@pytest.mark.parametrize("name", Replica.FOLLOWED)
def test_each_method_tells_its_own_name_and_numbers_once_and_nothing_else(lab, name):
    devices = Overheard()
    replica = lab.replica(lab.spec(optimizer={"name": "schedulefree_adamw"}), devices)
    numbers = [1] if name == "train_step" else []
    own = {"parameters": replica.model.state_dict()} if name == "put" else {}
    getattr(replica, name)(*numbers, **own)
    assert devices.told == [[name, *numbers]]


def test_helpers_with_the_whole_model_take_part_in_methods_of_a_replica_only():
    assert set(Microbatches.FOLLOWED) == {Replica.train_step.__name__} <= set(Replica.FOLLOWED)
    assert all(callable(getattr(Microbatches, name)) for name in Microbatches.FOLLOWED)
