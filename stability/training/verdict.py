"""Verdict of a run: stable, spiked, plateaued or diverged. No torch.

Diverged means a non-finite number or a gradient above ``guards.post_clip_norm``. Reports find the step at which a run
began to break by the same `SpikeWatch`, on the logged losses (`analysis.numbers.early_measurements`), and read a
spike's top out of its reason.
"""

from __future__ import annotations

from stability.runs.spikes import SpikeWatch


def judge(
    val_nll: float, init_nll: float, unigram_nll: float, watch: SpikeWatch, baseline: str = "token frequencies"
) -> tuple[str, str]:
    """Return (verdict, reason) of a run that reached its last step with finite numbers.

    ``plateaued``: no better than token (or class) frequencies or the untrained model. ``spiked``: the smoothed loss
    rose by more than the margin, even if it recovered (the reason says so). ``stable``: neither.

    Args:
        val_nll: final validation NLL in nats.
        init_nll: that of the untrained model.
        unigram_nll: that of the baseline.
        watch: the smoothed loss; its margin is the spec's or follows from the batch noise.
        baseline: name of the baseline for the reason.
    """
    if not val_nll < min(init_nll, unigram_nll):
        return (
            "plateaued",
            f"final validation NLL {val_nll:.3f} is not below min(initial {init_nll:.3f}, {baseline} "
            f"{unigram_nll:.3f})",
        )
    if watch.spiked:
        came_back = "and came back" if watch.last_rise <= watch.margin else "and had not come back at the end"
        return (
            "spiked",
            f"smoothed loss rose {watch.worst_rise:.2f} nats above its minimum by step {watch.worst_step} {came_back}",
        )
    return "stable", ""
