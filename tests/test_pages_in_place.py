"""The parts that docs/extending shows are put into a copy of the repository, as a reader would do it: the
contract tests of their families pick them up and pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = {
    "mechanism": "tests/mechanisms/test_contract.py",
    "optimizer": "tests/optimizers/test_contract.py",
    "norm": "tests/norms",
    "ffn": "tests/ffns",
    "objective": "tests/objectives/test_contract.py",
    "data_source": "tests/data/test_contract.py",
}


def shown(page: str) -> dict[str, str]:
    """Return the files that a page of docs/extending shows, by the path that stands in one of their first lines."""
    text = (ROOT / "docs" / "extending" / f"{page}.md").read_text()
    blocks = [block for _, block in re.findall(r"```(python)\n(.*?)```", text, re.DOTALL)]
    paths = [re.match(r"# (stability/\w+/\w+\.py)", block) for block in blocks]
    return {path[1]: block for path, block in zip(paths, blocks, strict=True) if path}


@pytest.mark.slow
@pytest.mark.parametrize("page", FAMILIES)
def test_a_pages_part_passes_the_contract_of_its_family(page, tmp_path):
    for folder in ("stability", "sweeps", "analysis", "kernels", "conf", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    files = shown(page)
    for path, text in files.items():
        assert not (tmp_path / path).exists(), path
        (tmp_path / path).write_text(text)
    names = {Path(path).stem for path in files}
    assert names and len(files) == len(names)
    words = [sys.executable, "-W", "ignore", "-m", "pytest", "-p", "no:cacheprovider", "-vv", FAMILIES[page]]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    skipped = re.findall(r"^SKIPPED .*", done.stdout, re.MULTILINE)
    for name in names:
        assert re.search(rf"::test_\w+\[[^\]]*\b{name}\b", done.stdout), f"no test picked {name} up"
        assert all("; add " in line for line in skipped if f": {name}: " in line), "a skip that says no way out"
