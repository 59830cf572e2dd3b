"""Convert a figure's words for the browser: matplotlib's mathematics as simple HTML."""

from __future__ import annotations

from stability.printable import visible

# the labels' mathematics apart from powers and indices
WORDS = {
    r"\mathdefault": "",
    r"\mathrm": "",
    r"\max": "max",
    r"\times": "×",
    r"\alpha": "α",
    r"\lambda": "λ",
    r"\cdot": "·",
}


def to_html(text: str) -> str:
    """Return matplotlib's text as plotly's simple HTML: α_max and powers of ten with their indices."""
    out = visible(text, keep="\n").replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", "<br>")
    for mark, sign in WORDS.items():
        out = out.replace(mark, sign)
    if "$" in out:
        out = _powers(out.replace("$", ""))
    return out.replace("α_max", "α<sub>max</sub>")


def _powers(text: str) -> str:
    """Return 10^{−3} and x_{i} with HTML's superscripts and subscripts."""
    for mark, tag in (("^", "sup"), ("_", "sub")):
        while f"{mark}{{" in text:
            before, _, rest = text.partition(f"{mark}{{")
            inside, _, after = rest.partition("}")
            text = f"{before}<{tag}>{inside}</{tag}>{after}"
    return text.replace("{", "").replace("}", "").replace("\\", "")
