"""Run an entry and record the project's files it enters; `benchmarks.house` starts this in its own process.

``python -P benchmarks/_traced.py ROOT OUT MODULE WORD …`` runs ``MODULE.main([WORD, …])`` with ``ROOT`` on PYTHONPATH
and writes the counts to ``OUT`` as JSON. A file is entered when any of its frames starts or resumes: a function, a
generator, or a module's body on import.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

STEP = 3  # counts files between this step and the next: neither the first nor a validated one


class Recorder:
    """Files entered between optimizer steps, and the call chain of the first step."""

    def __init__(self, folders: list[str]):
        self.folders = tuple(f"{folder}/" for folder in folders)
        self.entered: list[set[str]] = [set()]  # before the first step, between the first and the second, …
        self.chain: list[tuple[str, str]] = []

    def record_call(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a frame's file when it starts or resumes; a hook for `sys.setprofile`.

        Args:
            frame: the frame.
            event: only "call" counts.
            argument: unused.
        """
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(self.folders):
            self.entered[-1].add(file)

    def record_step(self, *arguments: Any) -> None:
        """Begin a new set of files; at the first step also store the call chain from ``main``. An optimizer's hook."""
        if not self.chain:
            frame = inspect.currentframe()
            while frame is not None and "main" not in [name for _, name in self.chain]:
                code = frame.f_code
                if code.co_filename.startswith(self.folders) and not code.co_name.startswith("<"):
                    self.chain.append((code.co_filename, code.co_name))
                frame = frame.f_back
            self.chain.reverse()
        self.entered.append(set())

    def counts(self) -> dict[str, Any]:
        """Return the counts for `benchmarks.house`; the step is number ``STEP`` + 1."""
        return {
            "frames": len(self.chain),
            "frame_files": len({file for file, _ in self.chain}),
            "chain": [f"{Path(file).stem}.{name}" for file, name in self.chain],
            "before": len(self.entered[0]),
            "step": len(self.entered[STEP]),
        }


def main(argv: list[str]) -> int:
    root, out, module, *words = argv
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    recorder = Recorder([f"{root}/{package}" for package in ("stability", "sweeps", "analysis", "kernels")])
    register_optimizer_step_pre_hook(recorder.record_step)
    sys.setprofile(recorder.record_call)
    code = importlib.import_module(module).main(words)
    sys.setprofile(None)
    Path(out).write_text(json.dumps(recorder.counts()))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
