"""Two processes, each with a part of the batch, get the numbers of one process with all of it."""

import os
from dataclasses import astuple

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.func import functional_call
from torch.nn import functional as F

from stability.curvature import AlphaMaxMonitor, directional
from stability.curvature.parallel import parallel_directional, parallel_mean

from .nets import random_direction, tiny

LR, STEPS = 0.05, 3
# (first row, last row, weight) of each rank's microbatches of a batch of 5: unequal ones, and once a rank where nothing
# counts.
SHARES = {"unequal": [[(0, 1, 1), (1, 3, 1)], [(3, 5, 1)]], "one_rank_idle": [[(0, 5, 1)], [(0, 2, 0)]]}
WHOLE = (0, 5, 1)
METHODS = ("taylor", "double_backward", "finite_difference")


def problem():
    net, params, _ = tiny()
    tokens = torch.randint(0, 7, (5, 6), generator=torch.Generator().manual_seed(5))

    def loss(p, share):
        start, stop, weight = share
        rows = tokens[start:stop]
        logits = functional_call(net, p, (rows[:, :-1],))
        return weight * F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"), weight * rows[
            :, 1:
        ].numel()

    return loss, params, random_direction(params)


def regression():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    generator = torch.Generator().manual_seed(1)
    return net, [torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def squares(model, x):
    return (model(x).squeeze(1) - x.sum(1).sin()).square().mean()


def watched(model, inputs):
    """The rows of a short training with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    monitor = AlphaMaxMonitor(model, optimizer, squares)
    for x in inputs:
        with monitor.step(x):
            optimizer.zero_grad()
            squares(model, x).backward()
            optimizer.step()
    return [astuple(row) for row in monitor.history]


def failure(rank):
    loss, params, direction = problem()

    def fails(p, rows):
        if rank == 1:
            raise KeyError("no such track")
        return loss(p, rows)

    try:
        parallel_directional(fails, params, direction, batches=[WHOLE])
    except (KeyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def work_on_gpus(rank, folder):
    """The monitor's rows under NCCL, a device for each rank."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    net, inputs = regression()
    found = watched(
        nn.parallel.DistributedDataParallel(net.to(rank), device_ids=[rank]), [x[rank::2].to(rank) for x in inputs]
    )
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    loss, params, direction = problem()
    found = {}
    for name, shares in SHARES.items():
        for method in METHODS:
            result = parallel_directional(loss, params, direction, method, batches=shares[rank])
            found[name, method] = astuple(result)
    found["mean"] = parallel_mean(3.0 + rank, 2.0 + rank)
    found["error"] = failure(rank)
    net, inputs = regression()
    found["monitor"] = watched(nn.parallel.DistributedDataParallel(net), [x[rank::2] for x in inputs])
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    # a normal exit now and then aborts in the destructor of gloo's threads (torch 2.13), long after the work is done
    os._exit(0)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(work, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.redraws
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shares", SHARES)
def test_every_rank_gets_the_numbers_of_the_whole_batch(ranks, shares, method):
    loss, params, direction = problem()
    whole = directional(loss, params, direction, method, batches=[WHOLE])
    rel = 1e-10 if method != "finite_difference" else 1e-7  # which displacement a rank prefers depends on its rows
    for found in (rank[shares, method] for rank in ranks):
        assert found[:4] == pytest.approx(astuple(whole)[:4], rel=rel)
        assert found[4] == method
        if whole.shares:
            assert found[7] == pytest.approx(whole.shares, rel=1e-9, abs=1e-12)
    assert ranks[0][shares, method] == ranks[1][shares, method]


@pytest.mark.redraws
def test_the_monitor_of_a_ddp_model_equals_the_monitor_of_one_process(ranks):
    net, inputs = regression()
    alone = watched(net, inputs)
    assert len(alone) == STEPS
    for rank in ranks:
        for row, expected in zip(rank["monitor"], alone, strict=True):
            assert row[:8] == pytest.approx(expected[:8], rel=1e-10)
            assert row[8] == pytest.approx(expected[8], rel=1e-9)  # a difference of two losses
            assert row[9:] == expected[9:]


@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason="NCCL needs two GPUs; on such a machine: pytest tests/curvature/test_parallel.py -k nccl",
)
def test_the_monitor_under_nccl_equals_the_monitor_of_one_process(tmp_path):
    multiprocessing.spawn(work_on_gpus, args=(str(tmp_path),), nprocs=2)
    net, inputs = regression()
    alone = watched(net.cuda(), [x.cuda() for x in inputs])
    for rank in (0, 1):
        for row, expected in zip(torch.load(tmp_path / f"{rank}.pt", weights_only=True), alone, strict=True):
            assert row[:8] == pytest.approx(expected[:8], rel=1e-10)
            assert row[8] == pytest.approx(expected[8], rel=1e-9)


def test_means_weigh_the_ranks_by_their_counts(ranks):
    assert [rank["mean"] for rank in ranks] == [7 / 5, 7 / 5]


def test_an_error_on_one_rank_is_raised_on_all_of_them(ranks):
    assert (
        ranks[0]["error"] == "RuntimeError: another rank could not measure its part; rank 1: KeyError: 'no such track'"
    )
    assert ranks[1]["error"] == "KeyError: 'no such track'"


def test_outside_of_any_group_it_is_directional():
    loss, params, direction = problem()
    assert parallel_directional(loss, params, direction, batches=[(0, 2, 1), (2, 5, 1)]).curvature == pytest.approx(
        directional(loss, params, direction, batches=[WHOLE]).curvature, rel=1e-12
    )


def test_a_loss_without_its_count_is_refused():
    loss, params, direction = problem()
    with pytest.raises(ValueError, match=r"returns \(sum, count\), which ranks need"):
        parallel_directional(lambda p, rows: loss(p, rows)[0], params, direction, batches=[WHOLE])
    with pytest.raises(ValueError, match="returned the count -1"):
        parallel_directional(lambda p, rows: (loss(p, rows)[0], -1), params, direction, batches=[WHOLE])
