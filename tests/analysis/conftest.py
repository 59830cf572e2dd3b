"""The synthetic quickstart, written and read once for all tests of the package."""

from pathlib import Path

import pytest

from analysis.study.load import Study, load
from tests.analysis.synthetic import quickstart_alpha, write_study


@pytest.fixture(scope="session")
def quickstart_dir(tmp_path_factory) -> Path:
    return write_study(tmp_path_factory.mktemp("runs"), name="quickstart", alpha=quickstart_alpha)


@pytest.fixture(scope="session")
def quickstart(quickstart_dir) -> Study:
    return load(quickstart_dir)
