"""The plugins of these tests are known to them alone."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def plugins_of_a_test_alone(monkeypatch):
    monkeypatch.setattr("stability.registry._plugins", {})
