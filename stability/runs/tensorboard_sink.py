"""TensorBoard sink: event files in ``<run>/tensorboard``, by TensorBoard's own writer."""

from __future__ import annotations

import importlib
import json
import time
from typing import Any, ClassVar

from stability.runs.sink import AbstractSink, Told

FLUSH_S = 10  # a killed process loses at most so many seconds


class TensorboardSink(AbstractSink):
    """Event files of one run; scalars are float32, verdict, reason and spec are texts."""

    title: ClassVar[str] = "TensorBoard"

    @classmethod
    def require(cls) -> None:
        try:
            importlib.import_module("tensorboard")
        except ImportError:
            raise RuntimeError(
                "logger=tensorboard needs TensorBoard: pip install tensorboard, or choose logger=files"
            ) from None

    @classmethod
    def prepare(cls, runs_dir: str, study: str) -> tuple[dict[str, Any] | None, str]:
        return {}, f"TensorBoard: look with tensorboard --logdir {runs_dir}"

    def open(self, run: Told) -> bool:
        writing = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        folder = run.directory.path / "tensorboard"
        goes_on = folder.is_dir()
        self._writer = writing.EventFileWriter(str(folder), flush_secs=FLUSH_S)
        if goes_on and run.resume_after is not None:
            self._forget(run.resume_after + 1)
        if not goes_on:
            about = {"run_id": run.run_id, "study": run.group, "name": run.name, "spec": run.config}
            self._text("spec", f"```json\n{json.dumps(about, indent=2, sort_keys=True)}\n```", 0)
        return not goes_on

    def write(self, row: dict[str, Any]) -> None:
        summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        values = [summary.Value(tag=name, simple_value=value) for name, value in row.items() if name != "step"]
        self._add(row["step"], summary=summary(value=values))

    def close(self, summary: dict[str, Any]) -> None:
        for name in ("verdict", "reason"):
            if summary.get(name):
                self._text(name, summary[name], 0)
        self._writer.close()

    def _forget(self, step: int) -> None:
        """Make readers drop earlier values from this step on; a resumed run logs them again."""
        log = importlib.import_module("tensorboard.compat.proto.event_pb2").SessionLog
        self._add(step, session_log=log(status=log.START))

    def _text(self, name: str, text: str, step: int) -> None:
        writing = importlib.import_module("tensorboard.plugins.text.summary_v2")
        self._add(step, summary=writing.text_pb(name, text))

    def _add(self, step: int, **what: Any) -> None:
        event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._writer.add_event(event(wall_time=time.time(), step=step, **what))
