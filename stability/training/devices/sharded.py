"""One run split over the devices of a machine by torch's FSDP2 (`fully_shard`).

Parameters, gradients and optimizer state are split: each of n devices has a slice of about 1/n of every tensor, and
computes its own n-th of each batch. A block's parameters are gathered only while the block computes, and its gradients
are summed into slices. So beside the slices at most one block is whole on a device (embedding, norms and head count as
one block). Every process calls the same methods of a `Replica` in the same order. The run's main process alone chooses
them (guards, verdict, cadence, Ctrl-C) and instructs the helpers. It alone has the run's directory. Only there, in host
memory, are a checkpoint's tensors whole during reading or writing, so checkpoints equal those of any other run.

The numbers equal those of one device up to rounding, since sums have another order; over n devices they are always the
same bits. So like the kind of device, and unlike ``threads``, the number of shards is not part of a run's identity: a
run can resume on other machines. Resumed with the same number, it equals an undisturbed one bit for bit;
``timing.jsonl`` has the number for each step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from stability.config.run import RunSpec
from stability.models.backbone import Backbone
from stability.objectives import Examples
from stability.training.devices import Add, Devices, State, Sums, Tensors, add_sums, norms_of_groups
from stability.training.devices.processes import Helpers
from stability.training.machine import return_freed_memory


class ShardedDevices(Devices):
    """One process's share of a run in ``size`` processes.

    Args:
        device: device of this process.
        rank: its rank; 0 is the run's main process.
        size: number of processes.
        helpers: the other processes; only in the main process.
    """

    def __init__(self, device: torch.device, rank: int, size: int, helpers: Helpers | None = None):
        from torch.distributed.device_mesh import init_device_mesh

        return_freed_memory(device)
        self._size, self._rank, self._device, self._helpers = size, rank, device, helpers
        self._mesh = init_device_mesh(device.type, (size,))

    @classmethod
    def start(cls, spec: RunSpec, cache_dir: Path, device: torch.device, size: int) -> ShardedDevices:
        """Start the helpers, and return the share of the run's main process.

        Args:
            spec: the run.
            cache_dir: the pool's prepared data.
            device: device of the main process.
            size: number of processes.

        Raises:
            RuntimeError: as `Helpers`.
        """
        return cls(device, 0, size, Helpers(spec, cache_dir, device, size, shard=True))

    def end(self, error: BaseException | None) -> None:
        if self._helpers is not None:
            self._helpers.end(error)

    def describe(self) -> dict[str, int]:
        return {"shards": self._size}

    def tell(self, method: str, *numbers: int) -> None:
        if self._helpers is not None:
            self._helpers.tell(method, *numbers)

    def build(self, make: Callable[[], Backbone]) -> Backbone:
        """Build the sharded model; only the main process has whole initial parameters, on the CPU."""
        from torch.distributed.fsdp import FSDPModule, fully_shard

        # a warning against in-place changes of the model's output, a view of the head's; no code here changes it
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
        with torch.device("meta"):
            model = make()
        for module in (*model.blocks, model):
            sharded = fully_shard(module, mesh=self._mesh)
            assert isinstance(sharded, FSDPModule)
            # each process divides its losses by the whole batch's count: gradients add up
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        model.to_empty(device=self._device)
        self._model: Any = model
        self._make = make
        self._put_parameters(make().state_dict() if self._rank == 0 else None)
        return model

    def backward(self, add: Add, examples: Examples, rows: int, parameters: Sequence[nn.Parameter]) -> Sums:
        """Add the gradient of this process's own rows of the batch; return the sums of all.

        Args:
            add: adds the gradient of a microbatch, given its first row, and returns its sums.
            examples: the whole batch.
            rows: rows of a microbatch, at most.
            parameters: the model's parameters.
        """
        own = len(examples.targets_BN) // self._size
        first = self._rank * own
        share = examples.map_tensors(lambda tensor: tensor[first : first + own])
        own_sums = add_sums([add(part, first + rows * index) for index, part in enumerate(share.split(rows))])
        return tuple(torch.stack(self._gather_all(total)).sum() for total in own_sums)

    def local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [_local(tensor) for tensor in tensors]

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        return self._join(nn.utils.get_total_norm(self.local(tensors)))

    def norms(self, tensors: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> Tensor:
        return self._join(norms_of_groups(self.local(tensors), groups))

    def _join(self, norms: Tensor) -> Tensor:
        """Return the norms of whole tensors, given those of this process's parts."""
        # squared in float64: float32 would overflow from 2e19 on
        return torch.stack(self._gather_all(norms.double())).square().sum(0).sqrt().float()

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = self.norm(gradients)
        if math.isinf(limit):  # an infinite norm over it would be NaN
            return norm
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as in clip_grad_norm_
        for gradient in self.local(gradients):
            gradient.mul_(factor)
        return norm

    def all_true(self, is_so: bool) -> bool:
        return all(bool(flag) for flag in self._gather_all(torch.tensor(is_so, device=self._device)))

    def spread(self, function: Callable[[Any], tuple[float, ...]], items: Sequence[Any]) -> Iterator[tuple[float, ...]]:
        """Share the items out in turn."""
        results = []
        for start in range(0, len(items), self._size):
            # Every process must run the model, so in the last round some repeat the last item.
            own = torch.tensor(
                function(items[min(start + self._rank, len(items) - 1)]), dtype=torch.float64, device=self._device
            )
            results += self._gather_all(own)[: len(items) - start]
        self._model.reshard()  # without a backward pass, embedding and head would stay whole
        return iter([tuple(parts.tolist()) for parts in results])

    def put(self, model: nn.Module, optimizer: Optimizer, parameters: Tensors | None, state: State | None) -> None:
        """Load whole parameters and state from the main process into all processes.

        Args:
            model: receives the parameters.
            optimizer: receives the state.
            parameters: whole parameters by name; used in the main process only.
            state: the optimizer's whole state, likewise; None: unchanged.
        """
        self._put_parameters(parameters)
        values = [None if state is None else tree_map(_frame, state)]
        dist.broadcast_object_list(values, src=0, device=self._device)
        if (frame := values[0]) is not None:
            optimizer.load_state_dict(self._receive(optimizer, frame, state))

    def _put_parameters(self, parameters: dict[str, Tensor] | None) -> None:
        with torch.no_grad():
            for name, own in self._model.state_dict().items():
                own.copy_(self._hand_out(own, None if parameters is None else parameters[name]))

    def _receive(self, optimizer: Optimizer, frame: dict[str, Any], state: dict[str, Any] | None) -> dict[str, Any]:
        """Return the optimizer's state with this process's slices for the empty tensors of ``frame``."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        slices = {
            index: {
                name: self._hand_out(parameters[index], None if state is None else state["state"][index][name])
                if isinstance(value, Tensor) and value.is_meta
                else value
                for name, value in values.items()
            }
            for index, values in frame["state"].items()
        }
        return {**frame, "state": slices}

    def _hand_out(self, like: Tensor, whole: Tensor | None) -> Tensor:
        """Return this process's slice of a tensor that is whole in the main process."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(like, DTensor)
        assert whole is None or whole.shape == like.shape
        given = (
            torch.empty(like.shape, dtype=like.dtype, device=self._device) if whole is None else whole.to(self._device)
        )
        return distribute_tensor(given, self._mesh, like.placements)

    def gather(self, model: Backbone, optimizer: Optimizer) -> tuple[nn.Module, State]:
        """Gather the whole model and optimizer state on the CPU, tensor by tensor.

        In the helpers the tensors are empty.
        """
        parameters, state = tree_map(self._gather, (dict(model.state_dict()), optimizer.state_dict()))
        with torch.device("meta"):
            whole = self._make()
        if self._rank == 0:
            whole.load_state_dict(parameters, assign=True)
        return whole, state

    def _gather(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        whole = _gather_whole(value.detach())
        return whole.cpu() if self._rank == 0 else torch.empty(0)

    def _gather_all(self, own: Tensor) -> list[Tensor]:
        """Return each process's tensor, in order."""
        # In order everywhere: sums over them are the same bits in every process, and so are decisions.
        found = [torch.empty_like(own) for _ in range(self._size)]
        dist.all_gather(found, own)
        return found


def _local(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain


def _gather_whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _frame(value: Any) -> Any:
    """Return a tensor without its content; scalars (step counts) retain theirs."""
    return value.to("meta") if isinstance(value, Tensor) and value.ndim else value
