"""Where a page ends."""

from __future__ import annotations

import pytest
from pypdf import PdfReader

from analysis.drawing.pieces import PageBreak, paragraph, typst
from analysis.drawing.typeset import document
from analysis.report import _compile


@pytest.mark.parametrize("lines", [3, 60, 70])
def test_what_runs_over_the_first_page_shares_the_second_with_what_follows(tmp_path, lines):
    """Without the limit to page 1 the rest of a long first page would stand alone on the second."""
    front = tuple(piece for _ in range(lines) for piece in paragraph("first"))
    text = document("title", "", typst((*front, PageBreak(only=1), *paragraph("second"))))
    printed = [page.extract_text() for page in PdfReader(_compile(lambda folder: text, tmp_path / "a.pdf")).pages]
    assert len(printed) == 2 and "second" in printed[1] and "second" not in printed[0]
    assert ("first" in printed[1]) == (lines > 40)
