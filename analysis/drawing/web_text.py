"""Say a figure's words as a browser shows them: matplotlib's mathematics as simple HTML."""

from __future__ import annotations

from stability.printable import visible

# of the mathematics in labels; what is left of it are powers and indices
WORDS = {
    r"\mathdefault": "",
    r"\mathrm": "",
    r"\max": "max",
    r"\times": "×",
    r"\alpha": "α",
    r"\lambda": "λ",
    r"\cdot": "·",
}


def plain(text: str) -> str:
    """Return matplotlib's text as the simple HTML that plotly reads: α_max and powers of ten with their indices."""
    out = visible(text, keep="\n").replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", "<br>")
    for mark, sign in WORDS.items():
        out = out.replace(mark, sign)
    if "$" in out:
        out = _powers(out.replace("$", ""))
    return out.replace("α_max", "α<sub>max</sub>")


def _powers(text: str) -> str:
    """Return 10^{−3} and x_{i} with HTML's own raised and lowered signs."""
    for mark, tag in (("^", "sup"), ("_", "sub")):
        while f"{mark}{{" in text:
            before, _, rest = text.partition(f"{mark}{{")
            inside, _, after = rest.partition("}")
            text = f"{before}<{tag}>{inside}</{tag}>{after}"
    return text.replace("{", "").replace("}", "").replace("\\", "")
