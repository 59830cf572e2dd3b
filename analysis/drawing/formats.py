"""Render a table for other programs: data frame (CSV, parquet), Markdown and LaTeX (booktabs)."""

from __future__ import annotations

import re

import pandas as pd

from analysis.drawing.typeset import Cell, Table
from stability.printable import visible

# characters missing in LaTeX's own encodings; all others pass
SYMBOLS = {
    "α_max": r"$\alpha_{\max}$", "λ_max": r"$\lambda_{\max}$",
    "α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "ε": r"$\varepsilon$",
    "η": r"$\eta$", "θ": r"$\theta$", "κ": r"$\kappa$", "λ": r"$\lambda$", "Λ": r"$\Lambda$", "μ": r"$\mu$",
    "ν": r"$\nu$", "ξ": r"$\xi$", "ρ": r"$\rho$", "σ": r"$\sigma$", "τ": r"$\tau$", "Σ": r"$\Sigma$", "Φ": r"$\Phi$",
    "∇": r"$\nabla$", "∞": r"$\infty$", "≥": r"$\geq$", "≤": r"$\leq$", "×": r"$\times$", "·": r"$\cdot$",
    "±": r"$\pm$", "−": r"$-$", "→": r"$\to$", "≈": r"$\approx$", "√": r"$\surd$",
    "½": r"$\tfrac{1}{2}$", "²": r"$^2$", "³": r"$^3$", "ᵀ": r"$^\top$", "′": r"$'$", "″": r"$''$",
    "‖": r"$\|$", "⟨": r"$\langle$", "⟩": r"$\rangle$", "…": r"\dots{}",
    "—": "---", "–": "--", "“": "``", "”": "''", "’": "'", "\u200b": "",
}  # fmt: skip
SPECIAL = {"\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    character: "\\" + character for character in "&%$#_"
}
# a whole cell: 0.97, 1.4e-1, ≥ 1.50, 50 %, ×0.16
NUMBER = r"^(?:[≥≤×] ?)?([+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?: ?%)?$"
FORMULA_SIGNS = frozenset("=+-@\t\r\n＝＋－＠")
# a number, alone or before words without a call's, reference's or product's signs: +0.07 to +0.50 decades, n=3
HARMLESS = re.compile(r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?: ?%)?(?:[ ,;][\w ,.;%=≥≤–±+-]*)?")


def columns(table: Table) -> list[str]:
    """Return one unique name for each column from its group and heading; duplicates are numbered."""
    over = [text for text, span in table.groups for _ in range(span)] or [""] * len(table.header)
    names = [visible(" / ".join(filter(None, pair))) for pair in zip(over, table.header, strict=True)]
    return [name if names.index(name) == index else f"{name} ({index + 1})" for index, name in enumerate(names)]


def frame(table: Table) -> pd.DataFrame:
    """Return a table as text, cell by cell, without splitting for the page's width.

    Details (interval and n) are a separate column beside their values. A column with bold cells has a boolean column
    beside it.
    """
    data: dict[str, list[str] | list[bool]] = {}
    for index, name in enumerate(columns(table)):
        cells = [row[index].whole or row[index] for row in table.rows]
        data[name] = [visible(cell.text, keep="\n") for cell in cells]
        if any(cell.detail for cell in cells):
            data[f"{name}: detail"] = [visible(cell.detail.replace("\n", "; ")) for cell in cells]
        if any(cell.bold for cell in cells):
            data[f"{name}: bold"] = [cell.bold for cell in cells]
    return pd.DataFrame(data)


def add_numbers(table: Table) -> pd.DataFrame:
    """Return `frame` with ``NAME: number``, a column of floats, beside each column with numbers.

    NaN for a cell without a number; a bound ("≥ 1.50") gives its number.
    """
    text, named = frame(table), set(columns(table))
    found: dict[str, pd.Series] = {}
    for name, cells in text.items():
        found[f"{name}"] = cells
        if name not in named:
            continue
        numbers = cells.str.replace("−", "-").str.extract(NUMBER, expand=False).astype(float)
        if numbers.notna().any():
            found[f"{name}: number"] = numbers
    return pd.DataFrame(found)


def csv(table: Table) -> str:
    """Return a table as CSV without cells that a spreadsheet reads as formulas (`inert`)."""
    text = frame(table)
    inert_cells = text.map(lambda cell: inert(cell) if isinstance(cell, str) else cell)
    return inert_cells.set_axis(list(map(inert, text.columns)), axis=1).to_csv(index=False, lineterminator="\n")


def inert(cell: str) -> str:
    """Return a cell safe in a spreadsheet: text or a number, never computed.

    A leading apostrophe marks formula-like text (OWASP, CSV injection), except numbers, intervals and ``--``.
    """
    return f"'{cell}" if cell[:1] in FORMULA_SIGNS and cell != "--" and not HARMLESS.fullmatch(cell) else cell


def markdown(table: Table) -> str:
    """Return a table in GitHub's Markdown under its title, over its caption; details are subscripts."""
    aligned = table.align or ("left",) + ("center",) * (len(table.header) - 1)
    marks = {"left": ":---", "center": ":---:", "right": "---:"}
    lines = [
        _row(_markdown(name) for name in columns(table)),
        _row(marks.get(side, ":---:") for side in aligned),
        *(_row(_markdown_cell(cell) for cell in row) for row in table.rows),
    ]
    return f"**{_markdown(table.title)}**\n\n" + "\n".join(lines) + f"\n\n{_markdown(table.caption)}\n"


def _row(cells) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown(text: str) -> str:
    """Return text with all markup escaped."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", visible(text.replace("\n", " ")))


def _markdown_cell(cell: Cell) -> str:
    text = f"**{_markdown(cell.text)}**" if cell.bold and cell.text else _markdown(cell.text)
    return text + "".join(f"<br><sub>{_markdown(line)}</sub>" for line in cell.detail.split("\n") if line)


def latex(table: Table, label: str, *, has_long_caption: bool = False) -> str:
    """Return a LaTeX table; it needs booktabs and, for details, makecell.

    Args:
        table: the table.
        label: its label, after ``tab:``.
        has_long_caption: whether the table's notes and the data's source follow its title.
    """
    title, notes = tex(table.title), f" {tex(table.caption)}" if has_long_caption else ""
    aligned = table.align or ("left",) + ("center",) * (len(table.header) - 1)
    sides = "".join(side[0] if side in ("left", "center", "right") else "l" for side in aligned)
    head, rules, start = [], [], 1
    for text, span in table.groups:
        head.append(rf"\multicolumn{{{span}}}{{c}}{{{tex(text)}}}")
        rules += [rf"\cmidrule(lr){{{start}-{start + span - 1}}}"] if text else []
        start += span
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{\textbf{{{title}.}}{notes}}}" if notes else rf"\caption{{{title}}}",
        rf"\label{{tab:{label}}}",
        rf"\begin{{tabular}}{{{sides}}}",
        r"\toprule",
        *([" & ".join(head) + r" \\", "".join(rules)] if head else []),
        " & ".join(rf"\textbf{{{tex(name)}}}" if name else "" for name in table.header) + r" \\",
        r"\midrule",
        *(" & ".join(_latex_cell(cell) for cell in row) + r" \\" for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def tex(text: str) -> str:
    """Return text for LaTeX: special characters escaped, symbols as mathematics."""
    found, flat = "|".join(map(re.escape, [*SYMBOLS, *SPECIAL])), visible(text, keep="\n\u200b").replace("\n", " ")
    return re.sub(found, lambda match: SYMBOLS.get(match[0]) or SPECIAL.get(match[0], ""), flat)


def _latex_cell(cell: Cell) -> str:
    text = rf"\textbf{{{tex(cell.text)}}}" if cell.bold else tex(cell.text)
    if not cell.detail:
        return text
    below = "".join(rf" \\ {{\scriptsize {tex(line)}}}" for line in cell.detail.split("\n") if line)
    return rf"\makecell[t]{{{text}{below}}}"
