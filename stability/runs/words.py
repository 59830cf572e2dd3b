"""Hold what a study's tables, captions and board call things: the words of its objective and its data source, which a
sweep writes into ``study.json``. Nothing is imported here, so that what only reads files can read them, too."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ShareWords:
    """The words of a share, 0 to 1 and the more the better, that an objective validates beside its loss (one of its
    ``score_names``): tables, a figure, claims and the board then show it.

    ``column``: its name in ``metrics.jsonl``, which begins with ``val_``; ``name``: what it is called; ``of``: what it
    is a share of, as a caption goes on after "Share" or "Per cent".
    """

    column: str
    name: str
    of: str


@dataclass(frozen=True)
class Words:
    """The words of an objective; the defaults are a language model's.

    ``position``: what a model's position is called, and several of them; ``counted``: what a run's ``num_tokens``
      counts; ``example``: what a row of a batch is.
    ``nll``: what the validated loss is called, as an axis label; ``unit``: of that loss; ``generative_unit``: of what
      an oracle makes of samples; ``score``: the same as a caption says it, ``{draws}`` for how often each was measured;
      ``of_oracle``: the same of an ``{oracle}`` by name; ``of_sample``: the same beside a sample; ``is_text``: whether
      samples are text, which has bytes.
    ``held_out``: what the data are called in "on held-out …"; ``share``: what is validated beside the loss as a share,
      None: nothing is.
    ``parts``: what the parts of the loss are measured in, where it is a sum; ``scored_parts``: the same of an oracle.
    ``baseline``: what knows the targets' frequencies and nothing else; ``baseline_nll``: what it reaches;
      ``baseline_source``: whose frequencies these are.

    The rest differs by the settings, and a sweep adds it (`AbstractObjective.summary`, `AbstractDataSource.tokens_of`).
    ``summary``: the objective with the settings that a reader of a table must know; "": its name says it all.
    ``tokens``: what the data's tokens are, "" where that is not said; ``direction``: in which positions are read,
    "causal" or "bidirectional"; "": not known.
    """

    position: tuple[str, str] = ("token", "tokens")
    counted: str = "tokens"
    example: str = "sequence"
    nll: str = "validation NLL"
    unit: str = "nats per predicted token"
    generative_unit: str = "nats per token of the oracle"
    score: str = "Nats per token of the oracle, the first token of a sample given"
    of_oracle: str = "nats per token of {oracle}"
    of_sample: str = "nats per token of the oracle {oracle}"
    is_text: bool = True
    held_out: str = "text"
    share: ShareWords | None = None
    parts: str = "nats of each part"
    scored_parts: str = "Its NLL of the terminal checkpoints' samples: each part averaged over samples"
    baseline: str = "token frequencies"
    baseline_nll: str = "token-frequency NLL"
    baseline_source: str = "training tokens' frequencies"
    summary: str = field(default="", kw_only=True)
    tokens: str = field(default="", kw_only=True)
    direction: str = field(default="", kw_only=True)
