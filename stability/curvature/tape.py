"""Record the tensor operations of a function once, and run them again on other inputs.

A second run has no dispatch by Python, no autograd, and no allocation: every operation writes into memory planned
beforehand, views exist already, and what does not depend on the inputs is not computed again.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stability.curvature._jet import Jet

MOST_BYTES = 1 << 30  # beyond it arithmetic outweighs dispatch, so nothing is gained
# Reads by Python that torch's dispatcher does not see: the code after them could take another branch.
_UNSEEN = {getattr(Tensor, name) for name in ("tolist", "numpy", "__array__", "data_ptr", "storage", "__dlpack__")}
_FILLED = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_NUMBERLESS = _EMPTY | set(_FILLED) | {"full_like", "new_full"}  # they read a tensor's shape alone
_COPIES = {"clone", "_to_copy"}


class Refused(Exception):
    """The function cannot be recorded; the message says why."""


@dataclass
class Operation:
    """One recorded operation.

    Attributes:
        func: the ATen overload.
        args: its arguments.
        kwargs: its keyword arguments.
        written: tensors that it writes, new ones or arguments.
        reads: storages of its tensor arguments.
        writes: storages of ``written``.
        guard: the number that it must read again; None for other operations.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: list[Tensor]
    reads: set[int]
    writes: set[int]
    guard: Any = None

    @property
    def name(self) -> str:
        return self.func.overloadpacket.__name__


class Recorder(TorchDispatchMode):
    """List the operations on plain tensors, below second-order rules and autograd."""

    def __init__(self, inputs: Sequence[Tensor], most_bytes: int):
        super().__init__()
        self.most_bytes = most_bytes
        self.inputs = {_storage(tensor) for tensor in inputs}
        self.own: set[int] = set()  # storages made while recording
        self.operations: list[Operation] = []
        self._held: list[Any] = list(inputs)  # a freed storage's identity would be given to another
        self._num_bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler here, which takes seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(kind is Jet for kind in types):
            with self:
                return Jet.__torch_dispatch__(func, types, args, kwargs)
        self._refuse(func, args, kwargs)
        result = func(*args, **kwargs)
        read, given = _tensors([*args, *kwargs.values()]), _tensors([result])
        self._held.append((read, given))
        reads = {_storage(tensor) for tensor in read}
        if torch.Tag.data_dependent_output in func.tags:
            self.operations.append(Operation(func, args, kwargs, [], reads, set(), result))
        elif func._schema.is_mutable:
            self._add_write(func, args, kwargs, reads)
        elif not func._schema.returns:  # its error alone counts, as of a singular matrix; a run would not raise it
            raise Refused(f"{func} checks numbers")
        elif given and not {_storage(tensor) for tensor in given} <= reads:  # else views, which exist already
            for tensor in given:
                self._check_new(tensor)
            writes = {_storage(tensor) for tensor in given}
            if writes & reads:
                raise Refused(f"{func} returns new tensors and views")
            self.own |= writes
            reads = set() if func.overloadpacket.__name__ in _NUMBERLESS else reads
            self.operations.append(Operation(func, args, kwargs, given, reads, writes))
        return result

    def _add_write(self, func, args, kwargs, reads: set[int]) -> None:
        named = zip(func._schema.arguments, args, strict=False)
        given = [value for argument, value in named if argument.alias_info is not None and argument.alias_info.is_write]
        given += [kwargs[each.name] for each in func._schema.arguments if each.is_out and each.name in kwargs]
        written = _tensors(given)
        writes = {_storage(tensor) for tensor in written}
        if not writes <= self.own:
            raise Refused(f"{func} writes into a tensor that was there before")
        self.operations.append(Operation(func, args, kwargs, written, reads, writes))

    def _refuse(self, func, args, kwargs) -> None:
        if torch.Tag.nondeterministic_seeded in func.tags and _argument(func, args, kwargs, "dropout_p") != 0:
            raise Refused(f"{func} draws random numbers")
        if torch.Tag.inplace_view in func.tags:
            raise Refused(f"{func} changes a tensor's shape")
        if torch.Tag.dynamic_output_shape in func.tags and not _has_fixed_shape(func, args):
            raise Refused(f"the shape of {func} depends on numbers")

    def _check_new(self, tensor: Tensor) -> None:
        if type(tensor) is not Tensor and not isinstance(tensor, torch.nn.Parameter):
            raise Refused(f"a {type(tensor).__name__} is no plain tensor")
        if tensor.is_complex() or tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise Refused(f"a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}")
        self._num_bytes += tensor.untyped_storage().nbytes()
        if self._num_bytes > self.most_bytes:
            raise Refused(f"intermediate results exceed {self.most_bytes >> 20} MiB")


class _Unseen(TorchFunctionMode):
    """Refuse reads of a tensor's numbers that torch's dispatcher does not see."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _UNSEEN:
            raise Refused(f"{func.__name__} reads numbers of a tensor")
        return func(*args, **(kwargs or {}))


class Tape:
    """The recorded operations of a function of tensors, in planned memory.

    Args:
        function: called once, with copies of ``inputs``; returns a list of tensors.
        inputs: example inputs; a run takes other ones of the same shapes and dtypes.
        most_bytes: largest sum of all intermediate results; all exist at once while recording.

    Attributes:
        outputs: results of the last run; the next one overwrites them.
        externals: whether the function reads tensors that are neither inputs nor made from them.
        num_bytes: planned memory.

    Raises:
        Refused: the function's operations may depend on more than the inputs' shapes.
    """

    def __init__(
        self,
        function: Callable[[list[Tensor]], list[Tensor]],
        inputs: Sequence[Tensor],
        most_bytes: int = MOST_BYTES,
    ):
        self.inputs = [tensor.detach().clone() for tensor in inputs]
        recorder, python, numpy = Recorder(self.inputs, most_bytes), random.getstate(), _numpy_state()
        with _Unseen(), recorder:
            outputs = function(self.inputs)
        # numpy may be imported meanwhile
        if random.getstate() != python or numpy not in (None, _numpy_state()):
            raise Refused("random numbers are drawn")
        # the operations that the outputs or a guard depend on, in order
        needed, kept = {_storage(tensor) for tensor in outputs}, []
        for operation in reversed(recorder.operations):
            if operation.guard is not None or operation.writes & needed:
                needed |= operation.reads | operation.writes
                kept.append(operation)
        operations = kept[::-1]
        touched = {storage for each in operations for storage in each.reads | each.writes}
        self.externals = bool(touched - recorder.own - recorder.inputs)
        planned = _Plan(operations, outputs, _constants(recorder))
        self.num_bytes, self.outputs, self._calls = planned.num_bytes, planned.outputs, planned.calls

    def run(self, inputs: Sequence[Tensor]) -> bool:
        """Run the operations on other inputs.

        Returns:
            Whether every number read by the function's own code is the recorded one. If not, its branches may differ,
            and ``outputs`` are of no use.
        """
        with torch.inference_mode():
            if self.inputs:
                torch._foreach_copy_(self.inputs, list(inputs))
            try:
                for call in self._calls:
                    call()
            except _Diverged:
                return False
            return True


class _Diverged(Exception):
    """A number that the function's code reads is not the recorded one."""


def _compare(call: Callable[[], Any], number: Any) -> None:
    if call() != number:
        raise _Diverged


class _Plan:
    """Calls into shared memory: a storage's bytes serve another one after its last use."""

    def __init__(self, operations: list[Operation], outputs: list[Tensor], constants: set[int]):
        # also a guard that reads constants alone
        operations = [each for each in operations if not (each.writes or each.reads) <= constants]
        self._moved: dict[int, Tensor] = {}
        self._blocks: dict[int, torch.UntypedStorage] = {}  # storage -> its bytes in planned memory
        self.num_bytes = 0
        self.calls: list[Callable[[], Any]] = []
        kept = {_storage(tensor) for tensor in outputs}
        last = {storage: index for index, each in enumerate(operations) for storage in each.reads | each.writes}
        own = {storage for each in operations for storage in each.writes}
        free: list[torch.UntypedStorage] = []
        with torch.inference_mode():
            for index, each in enumerate(operations):
                for tensor in each.written:
                    if _storage(tensor) not in self._blocks:
                        self._blocks[_storage(tensor)] = self._block(tensor.untyped_storage().nbytes(), free)
                self._add(each)
                for storage in each.reads | each.writes:
                    if storage in own and storage not in kept and last[storage] == index:
                        free.append(self._blocks[storage])  # the latest first: it is still in the cache
            self.outputs = [self._place(tensor) for tensor in outputs]
        del self._moved

    def _block(self, num_bytes: int, free: list[torch.UntypedStorage]) -> torch.UntypedStorage:
        for index in reversed(range(len(free))):
            if num_bytes <= free[index].nbytes() <= 2 * num_bytes:
                return free.pop(index)
        self.num_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()

    def _place(self, item: Any) -> Any:
        """Return the same view of the planned memory, for a tensor of the recording."""
        if isinstance(item, (list, tuple)):
            return [self._place(each) for each in item]
        if not isinstance(item, Tensor) or _storage(item) not in self._blocks:
            return item.detach() if isinstance(item, Tensor) else item
        if id(item) not in self._moved:
            block, empty = self._blocks[_storage(item)], torch.empty(0, dtype=item.dtype)
            self._moved[id(item)] = empty.set_(block, item.storage_offset(), item.shape, item.stride())  # type: ignore[call-overload]
        return self._moved[id(item)]

    def _add(self, operation: Operation) -> None:
        args = [self._place(item) for item in operation.args]
        kwargs = {name: self._place(item) for name, item in operation.kwargs.items()}
        if operation.guard is not None:
            self.calls.append(partial(_compare, partial(operation.func, *args, **kwargs), operation.guard))
            return
        written = [self._place(tensor) for tensor in operation.written]
        if operation.func._schema.is_mutable:
            self.calls.append(partial(operation.func, *args, **kwargs))
        elif operation.name in _FILLED:
            self.calls.append(partial(written[0].fill_, _FILLED[operation.name]))
        elif operation.name in _COPIES:
            self.calls.append(partial(written[0].copy_, args[0]))
        elif operation.name not in _EMPTY:
            self.calls.append(_make_call(operation.func, args, kwargs, written))


def _make_call(func: Any, args: list[Any], kwargs: dict[str, Any], written: list[Tensor]) -> Callable[[], Any]:
    """Return a call of ``func`` into existing tensors, by its out= overload if it has one."""
    overload, names = _find_out_overload(func)
    if len(names) == len(written):
        return partial(overload, *args, **kwargs, **dict(zip(names, written, strict=True)))

    def copy() -> None:
        for target, result in zip(written, _tensors([func(*args, **kwargs)]), strict=True):
            target.copy_(result)

    return copy


@cache
def _find_out_overload(func: Any) -> tuple[Any, list[str]]:
    """Return the out= overload of an operation and the names of its outputs; none if it has no such overload."""
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        out = [argument.name for argument in overload._schema.arguments if argument.is_out]
        others = [(each.name, str(each.type)) for each in overload._schema.arguments if not each.is_out]
        if len(out) == len(func._schema.returns) and others == wanted:
            return overload, out
    return None, []


def _constants(recorder: Recorder) -> set[int]:
    """Return the storages made without any input; their numbers are final."""
    constant = set(recorder.own)
    while True:
        read_at: dict[int, int] = {}
        varying = set()
        for index, operation in enumerate(recorder.operations):
            if operation.reads <= constant and operation.writes <= constant and operation.guard is None:
                # written again after another operation read it: a run would read the later numbers
                varying |= {storage for storage in operation.writes if storage in read_at}
            else:
                varying |= operation.writes & constant
                for storage in operation.reads & constant:
                    read_at.setdefault(storage, index)
        if not varying:
            return constant
        constant -= varying


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Return an argument by name, or its default; None if the operation has none."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return kwargs.get(name, args[index] if index < len(args) else argument.default_value)
    return None


def _has_fixed_shape(func: Any, args: Any) -> bool:
    """Return whether an operation's shape is that of its indices, as without boolean masks."""
    by_masks = any(leaf.dtype in (torch.bool, torch.uint8) for leaf in _tensors(args[1:]))
    return func.overloadpacket is torch.ops.aten.index and not by_masks


def _numpy_state() -> bytes | None:
    return pickle.dumps(sys.modules["numpy"].random.get_state()) if "numpy.random" in sys.modules else None


def _tensors(items: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among arguments, and in lists of them."""
    found = []
    for item in items:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found += _tensors(item)
    return found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
