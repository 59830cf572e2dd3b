"""Tell whether a series' attention sees its own position, from what the study's record says of its settings."""

from __future__ import annotations

from analysis.study.load import Study
from stability.runs.recorded_words import recorded

SETTING = "mask_diagonal"


def sees_itself(study: Study, series: str) -> bool | None:
    """Return whether `sa` or `attentionx` sees its diagonal; None where the record does not say: no spec, no direction
    of its objective, another mechanism.

    A variant of an ablation (``mask_diagonal=true``) goes before the study's spec; what neither holds is the
    mechanism's default, which for `attentionx` is to see it where causal and not where bidirectional. A spec from
    before `sa` had the setting is of runs that saw it.
    """
    row = study.of(series).iloc[0]
    spec = study.study.get("spec")
    parts = {part.get("name"): part for part in spec.get("mechanism", [])} if isinstance(spec, dict) else {}
    if row["mechanism"] not in parts or row["mechanism"] not in ("sa", "attentionx"):
        return None
    masked = {"true": True, "false": False, "null": None}.get(
        row["variant"].removeprefix(f"{SETTING}="), parts[row["mechanism"]].get(SETTING)
    )
    if masked is not None:
        return not masked
    if row["mechanism"] == "sa":
        return True
    return {"causal": True, "bidirectional": False}.get(recorded(study.study, {row["objective"]}).direction)
