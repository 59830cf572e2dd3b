"""Compile kernels for a GPU that is not there: what a call of ours launches is handed to Triton's compiler and to
ptxas, for the H100 (sm_90), and no launch takes place.

A process of its own, since Triton here has been imported as an interpreter. Its code runs with ``launched``, a list
that each launch adds one `Compiled` to, as a dict.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

# threads that an SM of an H100 runs at most, and what it has for all of them
SHARED_LIMIT = 227 * 1024

_PRELUDE = '''
import json, re, subprocess, sys, tempfile
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
import kernels.availability

kernels.availability.require_device = lambda device: None  # which the operations ask before they launch

launched = []
NAMES = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8",
         torch.int8: "i8", torch.bool: "i1", torch.int32: "i32", torch.int64: "i64"}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "num_ctas")
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def typed(value):
    if value is None:
        return "constexpr"
    if isinstance(value, tuple):
        return tuple(map(typed, value))
    if isinstance(value, torch.Tensor):
        return "*" + NAMES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i64" if abs(value) >= 2**31 else "i32"


def resources(cubin):
    """Registers of a thread and bytes of its stack, where what does not fit into registers is kept."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        said = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True).stdout
    return int(re.search(r"REG:(\\d+)", said)[1]), int(re.search(r"STACK:(\\d+)", said)[1])


def run(self, *args, grid, warmup=False, **kwargs):
    options = {key: kwargs.pop(key) for key in OPTIONS if key in kwargs}
    values = {**dict(zip(self.arg_names, args)), **kwargs}
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(self.params):
        value = values[parameter.name]
        is_constant = parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1)
        signature[parameter.name] = "constexpr" if is_constant else typed(value)
        if is_constant:
            constants[(index,)] = value
        elif isinstance(value, tuple):
            constants |= {(index, place): None for place, each in enumerate(value) if each is None}
        elif isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=self, signature=signature, constexprs=constants, attrs=attributes)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, stack = resources(found.asm["cubin"])
    launched.append({"name": self.__name__, "shared": found.metadata.shared, "registers": registers, "stack": stack,
                     "num_warps": found.metadata.num_warps})


JITFunction.run = run
'''


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes on the GPU: bytes of shared memory of a block, registers of a thread, bytes that a thread
    keeps outside of its registers for want of them."""

    name: str
    shared: int
    registers: int
    stack: int
    num_warps: int

    def assert_fits(self) -> None:
        assert self.shared <= SHARED_LIMIT, self
        assert self.registers <= 255, self


def compiled(code: str) -> list[Compiled]:
    """Return what the launches of ``code``, which calls our operations with tensors on the CPU, compile to."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    program = _PRELUDE + textwrap.dedent(code) + "\nprint(json.dumps(launched))"
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [Compiled(**each) for each in json.loads(ended.stdout.splitlines()[-1])]
