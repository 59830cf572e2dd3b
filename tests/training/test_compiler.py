"""torch's compiler is imported when something is compiled, and is then whole."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from stability.startup import COMPILER, DISABLED, PostponedCompiler

TRAIN = """
import sys
import torch
from stability.startup import COMPILER, postpone_compiler

if {is_postponed}:
    postpone_compiler()
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
with torch.device("meta"):
    torch.nn.Embedding(5, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
print([value.hex() for value in model.weight.flatten().tolist()])
print(f"{{COMPILER}}.config" in sys.modules)
"""

COMPILE = """
compiled = torch.compile(lambda x: torch.sin(x) * 2, backend="eager", fullgraph=True)
assert torch.equal(compiled(torch.ones(2)), 2 * torch.sin(torch.ones(2)))
compiler = sys.modules[COMPILER]
assert type(compiler).__name__ == "module" and torch._dynamo is compiler
def stepped():
    optimizer.zero_grad()
    return torch.zeros(())
try:
    torch.compile(stepped, backend="eager", fullgraph=True)()
except compiler.exc.Unsupported as refusal:
    print(f"refused: {{str(refusal)!r}}")
"""


MEASURE = """
from stability.curvature import RecordedLoss, directional
params = {{name: param.detach() for name, param in model.named_parameters()}}
loss = lambda at: torch.func.functional_call(model, at, (torch.ones(4, 3),)).square().sum()
for each in (loss, RecordedLoss(loss)):
    print(directional(each, params, params, "taylor").curvature.hex())
print(f"{{COMPILER}}.config" in sys.modules)
"""


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=True).stdout


def test_optimizers_take_the_same_steps_without_the_compiler():
    weights, is_imported = run(TRAIN.format(is_postponed=True)).splitlines()
    others, is_imported_there = run(TRAIN.format(is_postponed=False)).splitlines()
    assert weights == others
    assert (is_imported, is_imported_there) == ("False", "True")


def test_curvature_is_measured_without_the_compiler():
    *found, is_imported = run((TRAIN + MEASURE).format(is_postponed=True)).splitlines()[-3:]
    assert is_imported == "False"
    assert found == run((TRAIN + MEASURE).format(is_postponed=False)).splitlines()[-3:-1]


def test_after_optimizers_the_compiler_compiles_and_refuses_their_functions_as_without_a_stand_in():
    found, other = (run((TRAIN + COMPILE).format(is_postponed=each)).splitlines()[-1] for each in (True, False))
    assert found == other and found.startswith("refused: ")


def test_the_stand_in_answers_for_itself_only_what_does_nothing(monkeypatch):
    import torch._dynamo as real

    stand_in = PostponedCompiler()
    monkeypatch.setitem(sys.modules, COMPILER, stand_in)

    def function():
        return 1

    assert stand_in.graph_break() is None and stand_in.disable(function, True, wrapping=False) is function
    with pytest.raises(AttributeError):
        stand_in.__file__  # noqa: B018 as `inspect` asks every module
    setattr(function, DISABLED, function)
    monkeypatch.setattr("stability.startup.importlib.import_module", lambda name: sys.modules.setdefault(name, real))
    assert stand_in.config is real.config
    assert sys.modules[COMPILER] is real and not hasattr(function, DISABLED)
    assert stand_in.disable(function) is not function and stand_in.disable(function)() == 1


def test_a_trial_s_settings_are_those_of_torch_s_own_function(monkeypatch):
    from stability.training.machine import prepare_torch

    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    for device in ("cuda", "cpu"):
        prepare_torch(1, torch.device(device))
        found = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        assert found == (device == "cuda", device == "cuda")
