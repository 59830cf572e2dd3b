"""The page in this process, as a browser with its token sees it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from stability.web import watching
from stability.web.app import make_app

TOKEN, HOST = "0123456789abcdef", "127.0.0.1:8000"
ORIGIN = f"http://{HOST}"


class Page:
    """A client that has opened the printed address."""

    def __init__(self, folder: Path, token: str = TOKEN):
        self.pool, self.reports = folder / "runs", folder / "reports"
        self.pool.mkdir(exist_ok=True)
        self.app = make_app(self.pool, self.reports, [HOST], token)
        self.client = TestClient(self.app, base_url=ORIGIN)
        self.csrf = re.search(
            r'name="csrf" value="([^"]+)"', self.client.get(f"/?command=describe&token={token}").text
        )[1]

    def get(self, path: str, **more):
        return self.client.get(path, **more)

    def post(self, path: str, fields=(), **headers):
        """Send a form as the page's own does."""
        given = {"csrf": self.csrf, **dict(fields)}
        return self.client.post(path, data=given, headers={"Origin": ORIGIN, **headers}, follow_redirects=False)

    def compose(self, words, command="sweep"):
        """The form's fields of some words, as a browser would send them."""
        fields: dict[str, list[str] | str] = {"command": command}
        for word in words:
            key, _, value = word.partition("=")
            names = value.strip("[]").split(",") if key in ("mechanism", "optimizer", "norm", "residual") else [value]
            fields[f"k:{key}"] = names
        return fields


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "POLL_S", 0.0)
    return Page(tmp_path)
