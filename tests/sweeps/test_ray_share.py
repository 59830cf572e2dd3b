"""How many trials a node holds, and whether it sees the runs' folder."""

from __future__ import annotations

import pytest

from sweeps.launchers.ray import shared_folder
from sweeps.launchers.ray.share import Share


@pytest.mark.parametrize(
    ("share", "resources", "number"),
    [
        (Share(1, 0), {"CPU": 8.0}, 8),
        (Share(0.1, 0), {"CPU": 0.3}, 3),
        (Share(1, 0.25), {"CPU": 16.0, "GPU": 2.0}, 8),
        (Share(1, 0.3333), {"CPU": 16.0, "GPU": 1.0}, 3),
        (Share(1, 0.4), {"CPU": 16.0, "GPU": 4.0}, 8),  # two a GPU: none lies across two
        (Share(1, 2), {"CPU": 16.0, "GPU": 5.0}, 2),
        (Share(1, 1), {"CPU": 16.0}, 0),
        (Share(4, 0.25), {"CPU": 6.0, "GPU": 1.0}, 1),
    ],
)
def test_a_node_holds_as_many_workers_as_its_cpus_and_gpus_allow(share, resources, number):
    assert share.fits(resources) == number


NODES = [
    {"NodeID": name, "NodeManagerHostname": f"host-{name}", "NodeManagerAddress": f"10.0.0.{name}"}
    for name in ("1", "2")
]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(shared_folder, "ARRIVAL_S", 0.05)
    monkeypatch.setattr(shared_folder, "_answer", lambda answer: answer)


def test_nodes_that_see_the_runs_folder_pass_and_no_token_is_left(tmp_path, quick):
    shared_folder.check(str(tmp_path), NODES, ask=shared_folder.reply)
    assert list(tmp_path.iterdir()) == []


def elsewhere(folder, token, name, token_file):
    """Node 2 answers as one on which the path leads to a folder of its own."""
    return shared_folder.reply(f"{folder}-of-{name}" if name == "2" else folder, token, name, token_file)


def deaf(folder, token, name, token_file):
    return ""


@pytest.mark.parametrize(
    ("ask", "name", "reason"),
    [(elsewhere, "2", "it is not there"), (deaf, "1", "a file written there does not arrive here")],
)
def test_the_node_that_does_not_see_the_runs_folder_is_named(tmp_path, quick, ask, name, reason):
    with pytest.raises(RuntimeError) as error:
        shared_folder.check(str(tmp_path), NODES, ask=ask)
    rule = "every node must see it under the same path; put runs_dir on a shared file system"
    assert (
        str(error.value)
        == f"node host-{name} (10.0.0.{name}) of the Ray cluster and the runs' folder {tmp_path}: {reason};\n{rule}"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_the_same_name_with_another_token_is_another_folder(tmp_path):
    (tmp_path / "token").write_text("other")
    assert shared_folder.reply(str(tmp_path), "mine", "1", "token") == "another folder of that name lies there"
