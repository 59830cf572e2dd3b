"""Check whether every node of a Ray cluster sees the runs' folder.

The driver writes a token there; each node reads it and writes it back beside it.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stability.printable import line_of
from stability.runs.leftovers import name_temporary

ANSWER_S = 60.0  # a node starts a process for its answer
ARRIVAL_S = 10.0  # delay until a network file system shows another machine's new files
TOKEN = "token"
BLIND = "the runs' folder is not there on node "  # followed by the node's id in a worker's error
RULE = "every node must see it under the same path; put runs_dir on a shared file system"

Ask = Callable[[str, str, str, str], Any]


def check(pool: str, nodes: Sequence[dict[str, Any]], ask: Ask | None = None) -> None:
    """Raise a ``RuntimeError`` for the first node without access to ``pool``.

    Args:
        pool: the runs' folder.
        nodes: nodes as in ``ray.nodes()``.
        ask: replaces the remote task in tests.
    """
    for told in find_unseen(pool, nodes, ask).values():
        raise RuntimeError(f"{told};\n{RULE}")


def find_unseen(pool: str, nodes: Sequence[dict[str, Any]], ask: Ask | None = None) -> dict[str, str]:
    """Return an error message per node id without access to ``pool``.

    A node without an answer counts as such.

    Args:
        pool: the runs' folder.
        nodes: nodes as in ``ray.nodes()``.
        ask: replaces the remote task in tests.
    """
    folder, token = name_temporary(Path(pool) / f"seen-{uuid.uuid4().hex[:12]}"), uuid.uuid4().hex
    folder.mkdir(parents=True)
    (folder / TOKEN).write_text(token)
    told = {}
    try:
        pending = {node["NodeID"]: (ask or _ask)(str(folder), token, node["NodeID"], TOKEN) for node in nodes}
        for node in nodes:
            if reason := _answer(pending[node["NodeID"]]) or _await_answer(folder / node["NodeID"], token):
                told[node["NodeID"]] = describe_failure(node, pool, reason)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return told


def describe_failure(node: dict[str, Any], pool: str, reason: str) -> str:
    """Return the message on a node without access to the runs' folder.

    Args:
        node: the node as in ``ray.nodes()``.
        pool: the runs' folder.
        reason: the failure.
    """
    return f"node {name_of(node)} of the Ray cluster and the runs' folder {pool}: {reason}"


def name_of(node: dict[str, Any]) -> str:
    """Return a node's name for messages: ``"gpu-07 (10.0.0.7)"``."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def reply(folder: str, token: str, name: str, token_file: str) -> str:
    """Read the token on a node, and write it back; return the error, or "".

    Args:
        folder: the folder with the token.
        token: the expected token.
        name: name of the file to write.
        token_file: name of the file to read.
    """
    deadline = time.monotonic() + ARRIVAL_S
    while not Path(folder).is_dir() and time.monotonic() < deadline:
        time.sleep(0.2)
    try:
        if (Path(folder) / token_file).read_text() != token:
            return "another folder of that name lies there"
        (Path(folder) / name).write_text(token)
    except FileNotFoundError:
        return "it is not there"
    except OSError as error:
        return f"it is not writable there ({error.strerror})"
    return ""


def _ask(*arguments: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(arguments[2], soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(reply).options(scheduling_strategy=there).remote(*arguments)


def _answer(pending: Any) -> str:
    import ray
    from ray import exceptions

    try:
        return ray.get(pending, timeout=ANSWER_S)
    except exceptions.GetTimeoutError:
        return f"no answer from there within {ANSWER_S:.0f} s"
    except exceptions.RayError as error:  # died, or cannot import this package
        return f"asking there failed ({line_of(error, -1)})"


def _await_answer(answer: Path, token: str) -> str:
    deadline = time.monotonic() + ARRIVAL_S
    while True:
        if answer.is_file() and answer.read_text() == token:
            return ""
        if time.monotonic() > deadline:
            return "a file written there does not arrive here"
        time.sleep(0.2)
