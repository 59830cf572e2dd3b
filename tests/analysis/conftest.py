"""The synthetic quickstart, written and read once for all tests of the package."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from analysis import assembly
from analysis.study.load import Study, load
from tests.analysis.synthetic import quickstart_alpha, write_study


@pytest.fixture(scope="session")
def quickstart_dir(tmp_path_factory) -> Path:
    return write_study(tmp_path_factory.mktemp("runs"), name="quickstart", alpha=quickstart_alpha)


@pytest.fixture(scope="session")
def quickstart(quickstart_dir) -> Study:
    return load(quickstart_dir)


@pytest.fixture
def drawn(monkeypatch) -> Callable[..., None]:
    """Choose the figures of a report that are drawn, by how their names begin; in the places of the others stand empty
    ones of the same size. Drawing takes most of a report's time, and a test of one section reads its text and its own
    figures; `test_report` draws all of a report's."""
    save = assembly.save

    def only(*names: str) -> None:
        def save_some(figure: Figure, path: Path) -> Path:
            is_drawn = re.sub(r"^\d+-", "", path.stem).startswith(names)
            return save(figure if is_drawn else Figure(figsize=tuple(figure.get_size_inches())), path)

        monkeypatch.setattr(assembly, "save", save_some)

    return only
