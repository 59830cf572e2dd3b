"""Measure α_max of a Hugging Face causal language model on the user's own text: which learning rate its curvature bears
before a fine-tuning starts."""

from __future__ import annotations

import math
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import functional_call

from stability.build import resolve_device
from stability.config.curvature import CurvatureSpec
from stability.config.entries import HessianSpec
from stability.config.parts import Part
from stability.corpora.tokens.corpus import Corpus
from stability.corpora.tokens.tokenizers import ByteTokenizer
from stability.curvature import NOT_DEFINED
from stability.objectives._base import Examples
from stability.probes.curvature.descent import Descent
from stability.registry import Registry
from stability.training.draws import generator_for

BATCH, POSITIONS, CLIP_NORM = 8, 128, 1.0  # where the spec is silent; 1.0 is the paper's and the Trainer's own
COLUMNS = ("state", "step", "lr", "slope", "curvature", "alpha_max", "method", "rel_error", "loss_before", "loss_after")
_PROBE = "the quick brown fox"


class HuggingFaceProbe:
    """The model in float32 and eval mode (no dropout), its text, and the rows measured so far. Reads the model's
    folder, never writes to it.

    AdamW with torch's defaults (β 0.9 and 0.999, weight decay 1e-2) takes the protocol's steps at a constant rate.
    Errors: ``ValueError`` for a model that cannot be had or text that does not do; ``RuntimeError`` where transformers
    is not installed.
    """

    def __init__(self, spec: HessianSpec):
        assert spec.hf is not None and spec.data is not None
        self.curvature: CurvatureSpec = spec.curvature
        self.device = resolve_device(spec.device)
        corpus = Registry("data").load(spec.data.name).prepare(spec.data.settings)
        self.model = load_model(spec.hf).to(self.device)
        vocabulary = self.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        self.positions = _positions(self.model, spec.positions)
        batches = self.curvature.warmup_batches + self.curvature.warmup_steps + self.curvature.recorded_steps
        self.batch = self.curvature.batch or BATCH
        wanted = batches * self.batch * (self.positions + 1)
        self.tokens, how = tokenised(corpus, spec.data, spec.hf, vocabulary, wanted)
        if len(self.tokens) <= self.positions:
            raise ValueError(
                f"data: {len(self.tokens):,} tokens of text are fewer than one window of positions={self.positions} "
                "and its target"
            )
        self.objective = Registry("objectives").load("ar")(Registry("objectives").load("ar").Config(), vocabulary)
        self.params: dict[str, Tensor] = dict(self.model.named_parameters())
        self.start = {name: param.detach().clone() for name, param in self.params.items()}
        self.rows: list[dict[str, Any]] = []
        count = sum(param.numel() for param in self.params.values())
        sizes = f"{count:,} parameters, float32, {self.batch} sequences of {self.positions} tokens a step"
        self.description = (
            f"{spec.hf}: {type(self.model).__name__}, {sizes}\n{corpus.description}; {len(self.tokens):,} tokens {how}"
        )

    def measure(self, lr: float) -> Iterator[None]:
        """Measure one rate by the protocol from both warm-ups, yielding after every step: "paper" (the means of 5.2.1)
        and "plain" (AdamW's own averages and bias correction over the same warm-up batches); an entry "checkpoint" of
        the spec's states means plain, for there is no other state."""
        for state in dict.fromkeys("plain" if name == "checkpoint" else name for name in self.curvature.state):
            with torch.no_grad():
                for name, param in self.params.items():
                    param.copy_(self.start[name])
            adamw = Registry("optimizers").load("adamw")
            optimizer = adamw.build(adamw.Config(), self.params.values(), lr)
            descent = Descent(
                self.params, optimizer, self._loss_sum, self._examples, self.curvature, lr=lr, clip_norm=CLIP_NORM
            )
            for row in descent.rows(state):
                if row is not None:
                    self.rows.append({"state": state, **row})
                yield

    def table(self) -> pd.DataFrame:
        """Return a table with a row a recorded step: `COLUMNS`, losses in nats; NaN in a step that was lost to a
        divergence, which has no numbers."""
        found = pd.DataFrame(self.rows)
        return found.reindex(columns=list(dict.fromkeys([*COLUMNS, *found.columns])))

    def _examples(self, index: int) -> Examples:
        """Return batch number ``index``: random windows of the tokenised text, inputs and next tokens (B, N)."""
        generator = generator_for(self.curvature.seed, "curvature", index)
        starts = torch.randint(len(self.tokens) - self.positions, (self.batch,), generator=generator)
        windows = self.tokens[starts[:, None].numpy() + np.arange(self.positions + 1)]
        return self.objective.examples(torch.from_numpy(windows.astype(np.int64)), generator).to(self.device)

    def _loss_sum(self, params: Mapping[str, Tensor], examples: Examples) -> tuple[Tensor, Tensor]:
        logits = functional_call(
            self.model, dict(params), (), {"input_ids": examples.inputs_BN, "use_cache": False}
        ).logits
        return self.objective.loss_sum(logits, examples)


def load_model(name: str) -> nn.Module:
    """Load a causal LM from a folder or, where the cache or the network has it, from the hub; float32, eval mode.
    Errors: two lines of ``ValueError``."""
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).expanduser().is_dir():
        raise ValueError(
            f"hf={name}: no such folder\ngive a folder that save_pretrained wrote, or a model's name on the hub, "
            "e.g. hf=gpt2"
        )
    try:
        model, found = _from_pretrained(_transformers().AutoModelForCausalLM, name, output_loading_info=True)
    except Exception as error:  # whatever hub, parser or weights raise, it is the model that cannot be had
        if isinstance(error, RuntimeError) and "pip install" in str(error):
            raise
        raise ValueError(
            f"hf={name}: {_why_not(name)}\n({type(error).__name__}: "
            f"{(str(error).strip().splitlines() or [''])[0][:200]})"
        ) from None
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"hf={name}: it has no weights for {', '.join(missing[:2])}, so this {type(model).__name__} would "
            "guess\nits loss would mean nothing"
        )
    model = model.float().eval()
    broken = next((key for key, weight in model.named_parameters() if not weight.isfinite().all()), None)
    if broken is not None:
        raise ValueError(
            f"hf={name}: its weight {broken} holds numbers that are not finite\ngive a checkpoint from before that "
            "happened"
        )
    if not _is_causal(model):
        raise ValueError(
            f"hf={name}: this {type(model).__name__} reads the tokens that it would have to predict\ngive a causal "
            "language model, e.g. hf=gpt2"
        )
    return model


@torch.no_grad()
def _is_causal(model: nn.Module) -> bool:
    """Return whether what the first position says is the same whatever follows; an encoder loads as a language model
    without a word."""
    tokens_BN = torch.tensor([[0, 1, 1, 1], [0, 2, 2, 2]])
    logits_BNV = model(input_ids=tokens_BN, use_cache=False).logits
    return torch.allclose(logits_BNV[0, 0], logits_BNV[1, 0], rtol=1e-4, atol=1e-5 * float(logits_BNV.abs().max()))


def _from_pretrained(kind: Any, name: str, **options: Any) -> Any:
    """Load from the folder or the cache; from the hub only where neither has it and it answers (its client retries for
    half a minute otherwise)."""
    place = str(Path(name).expanduser())
    try:
        return kind.from_pretrained(place, local_files_only=True, **options)
    except (OSError, ValueError):
        if Path(place).is_dir() or not hub_answers():
            raise
    return kind.from_pretrained(place, **options)


def hub_answers() -> bool:
    """Return whether the hub can be reached at all, asked once with a time limit; proxies are respected."""
    try:
        urllib.request.urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def _why_not(name: str) -> str:
    if Path(name).expanduser().is_dir():
        return (
            "the folder must hold config.json and the weights of a causal language model, as save_pretrained writes "
            "them"
        )
    return (
        "no such folder, not in the cache, and no network to fetch it"
        if not hub_answers()
        else "no such folder, and no such causal LM on the hub"
    )


def tokenised(corpus: Corpus, data: Part, name: str, vocabulary: int, wanted: int) -> tuple[np.ndarray, str]:
    """Return (1-D int64 tokens, how they were made). Documents of the training side in their own, hashed, order, until
    ``wanted`` tokens are there, by the model's tokenizer, the end-of-text token between them; by bytes where the model
    has none. Errors: ``ValueError`` where neither is possible."""
    if corpus.kind != Corpus.kind:
        raise ValueError(
            f"data={data.name}: a language model reads text, and this is {corpus.kind}; e.g. data=text "
            "data.path=FILE_OR_FOLDER"
        )
    if corpus.vocabulary is not None and corpus.vocabulary.name == "gpt2":
        raise ValueError(
            f"data.tokenizer=gpt2: hf={name} is given the text itself and uses a tokenizer of its own; leave "
            "data.tokenizer=bytes"
        )
    if corpus.vocab_size != ByteTokenizer.vocab_size:
        raise ValueError(
            f"data={data.name}: a language model reads text, and this is none; e.g. data=text data.path=FILE_OR_FOLDER"
        )
    tokenizer = load_tokenizer(name)
    if tokenizer is None:
        if vocabulary < ByteTokenizer.vocab_size:
            raise ValueError(
                f"hf={name}: no tokenizer beside it, and its vocabulary of {vocabulary} is too small for bytes\nsave "
                "the tokenizer beside the model"
            )
        return corpus.train_tokens[:wanted].astype(
            np.int64
        ), "(bytes: no tokenizer was found beside the model, which is right only if it was trained on bytes)"
    pieces: list[int] = []
    end = tokenizer.eos_token_id
    for document in _documents(corpus):
        pieces += tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        pieces += [] if end is None else [end]
        if len(pieces) >= wanted:
            break
    tokens = np.array(pieces, dtype=np.int64)
    if tokens.size and tokens.max() >= vocabulary:
        raise ValueError(
            f"hf={name}: its tokenizer gives token {tokens.max()}, the model knows {vocabulary}\nthe two do not "
            "belong together"
        )
    return tokens, f"({type(tokenizer).__name__})"


def load_tokenizer(name: str) -> Any | None:
    """Return the model's own tokenizer; None where there is none, or only an empty one that transformers makes up from
    the configuration: all is unknown to it."""
    try:
        tokenizer = _from_pretrained(_transformers().AutoTokenizer, name)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError):
        return None
    return tokenizer if len(set(tokenizer(_PROBE, add_special_tokens=False)["input_ids"])) > 1 else None


def answer(rows: pd.DataFrame) -> str:
    """Return the table, a line a rate and state, and what it says: whether nine steps in ten stay below α_max at each
    rate that was asked about, what diverged, and by how much the two states differ."""
    undefined: Any = rows[rows["method"] == NOT_DEFINED]
    defined: Any = rows[rows["method"] != NOT_DEFINED]
    lines = [
        f"{'lr':>9}  {'state':6} {'median α_max':>12} {'10 % quantile':>14} {'stable':>7} {'loss fell':>10}  method, "
        "against differences"
    ]
    states, verdicts = list(dict.fromkeys(defined["state"])), []
    for lr in sorted(set(defined["lr"])):
        for state in states:
            part: Any = defined[(defined["lr"] == lr) & (defined["state"] == state)]
            lines.append(_line(part, lr, state))
            if state == "plain" or "plain" not in states:
                verdicts.append(_verdict(part, lr))
            elif part["alpha_max"].isna().any():
                verdicts.append(_divergence(part, f"lr={lr:g}, state {state}"))
    verdicts += (
        [f"{len(undefined)} steps have no α_max and are left out: {undefined['note'].iloc[0]}"]
        if len(undefined)
        else []
    )
    return "\n".join([*lines, "", *verdicts, *_ratios(defined)])


def _line(part: Any, lr: float, state: str) -> str:
    median, low = quantile(part["alpha_max"], 0.5), quantile(part["alpha_max"], 0.1)
    stable, fell = 100 * (part["alpha_max"] > lr).mean(), 100 * (part["loss_after"] < part["loss_before"]).mean()
    error = part["rel_error"].dropna()
    check = f"{error.iloc[0]:.1e}" if len(error) else "--"
    return (
        f"{lr:9.3g}  {state:6} {median:12.3g} {low:14.3g} {stable:6.0f}% {fell:9.0f}%  "
        f"{', '.join(dict.fromkeys(part['method']))}, {check}"
    )


def _ratios(rows: pd.DataFrame) -> list[str]:
    """Return a sentence a rate: the median α_max of state paper over that of state plain, among finite positive values;
    none where a state has no such value."""
    known: Any = rows[np.isfinite(rows["alpha_max"]) & (rows["alpha_max"] > 0)]
    sentences = []
    for lr in sorted(set(rows["lr"])):
        paper, plain = (
            known["alpha_max"][(known["lr"] == lr) & (known["state"] == state)] for state in ("paper", "plain")
        )
        if len(paper) and len(plain):
            ratio = f"{paper.median() / plain.median():.2g} times that of state plain"
            sentences.append(
                f"lr={lr:g}: state paper (the warm-up of 5.2.1) has a median α_max {ratio} (finite positive steps, "
                f"n={len(paper)} and {len(plain)})"
            )
    return sentences


def _divergence(part: Any, where: str) -> str:
    lost = int(part["alpha_max"].isna().sum())
    origin = part["note"].dropna().iloc[:1].tolist() if "note" in part else []
    return (
        f"{where}: it diverged. {lost} of {len(part)} recorded steps were lost to a loss or a gradient that is not "
        "finite" + "".join(f": {o}" for o in origin)
    )


def _verdict(part: Any, lr: float) -> str:
    """Say of one rate whether nine in ten recorded steps, half of them, or fewer stay below α_max; or that it
    diverged."""
    if part["alpha_max"].isna().any():
        return _divergence(part, f"lr={lr:g}")
    median, low = quantile(part["alpha_max"], 0.5), quantile(part["alpha_max"], 0.1)
    word = (
        "its curvature bears it"
        if low > lr
        else "at the edge: more than one step in ten is beyond"
        if median > lr
        else "too high"
    )
    if math.isinf(low):
        return f"lr={lr:g}: {word}. Along nine steps in ten it is not positive and limits no rate"
    return (
        f"lr={lr:g}: {word}. Half of the steps bear {median:.3g}, nine in ten {low:.3g} ({low / lr:.2g} times the "
        "rate asked about)"
    )


def quantile(values: Any, share: float) -> float:
    """Return the recorded value of a column at or below the quantile; ∞ counts as the largest, a step lost to a
    non-finite loss as 0."""
    ordered = np.sort(values.fillna(0.0).to_numpy(dtype=float))
    return float(ordered[math.floor(share * (len(ordered) - 1))])


def _documents(corpus: Corpus) -> Iterator[str]:
    """Yield the texts of the training side: bytes between separators, which occur in no text."""
    tokens = np.asarray(corpus.train_tokens)
    ends = np.append(np.flatnonzero(tokens == ByteTokenizer.separator), len(tokens))
    start = 0
    for end in ends:
        yield ByteTokenizer().decode(tokens[start:end])
        start = int(end) + 1


def _positions(model: nn.Module, asked: int | None) -> int:
    most = getattr(model.config, "max_position_embeddings", None) or asked or POSITIONS
    if asked is not None and asked > most:
        raise ValueError(f"positions={asked}: the model has {most} positions; give at most positions={most}")
    return asked or min(POSITIONS, most)


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        import transformers
    except ImportError:
        raise RuntimeError("hf=… needs transformers, which is not installed; pip install transformers") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
