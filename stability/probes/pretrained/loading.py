"""Load Hugging Face models and tokenizers, refuse unsuitable ones, and tokenise text."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from stability.config.parts import Part
from stability.corpora.tokens.corpus import Corpus
from stability.corpora.tokens.vocabulary import ByteTokenizer

_PROBE = "the quick brown fox"


def load_model(name: str) -> nn.Module:
    """Load a causal LM from a folder, the cache or the hub; float32, eval mode.

    Raises:
        ValueError: no such model, or not causal; two lines.
    """
    model = _load_model(name, "AutoModelForCausalLM")
    if not _is_causal(model):
        raise ValueError(
            f"hf={name}: this {type(model).__name__} reads the tokens that it would have to predict\ngive a causal "
            "language model, e.g. hf=gpt2"
        )
    return model


def load_masked_model(name: str) -> nn.Module:
    """Load a masked LM as `load_model` loads a causal one."""
    return _load_model(name, "AutoModelForMaskedLM")


def is_masked(name: str) -> bool:
    """Return whether a model's configuration declares masked prediction.

    False for an unreadable configuration; loading then reports the cause.
    """
    try:
        config = _from_pretrained(_transformers().AutoConfig, name)
    except (OSError, ValueError, KeyError):
        return False
    return any(architecture.endswith("ForMaskedLM") for architecture in config.architectures or ())


def _load_model(name: str, kind: str) -> nn.Module:
    """Load a language model by a transformers auto class; all weights present and finite."""
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).expanduser().is_dir():
        raise ValueError(
            f"hf={name}: no such folder\ngive a folder that save_pretrained wrote, or a model's name on the hub, "
            "e.g. hf=gpt2"
        )
    try:
        model, found = _from_pretrained(getattr(_transformers(), kind), name, output_loading_info=True)
    except Exception as error:  # hub, parser and weights raise many types; all mean an unavailable model
        if isinstance(error, RuntimeError) and "pip install" in str(error):
            raise
        raise ValueError(
            f"hf={name}: {_explain_failure(name)}\n({type(error).__name__}: "
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
    return model


@torch.no_grad()
def _is_causal(model: nn.Module) -> bool:
    """Return whether the first position's logits are independent of later tokens."""
    # transformers loads an encoder as a causal LM without a warning
    tokens_BN = torch.tensor([[0, 1, 1, 1], [0, 2, 2, 2]])
    logits_BNV = model(input_ids=tokens_BN, use_cache=False).logits
    return torch.allclose(logits_BNV[0, 0], logits_BNV[1, 0], rtol=1e-4, atol=1e-5 * float(logits_BNV.abs().max()))


def _from_pretrained(kind: Any, name: str, **options: Any) -> Any:
    """Load from the folder or cache, else from the hub if reachable."""
    place = str(Path(name).expanduser())
    try:
        return kind.from_pretrained(place, local_files_only=True, **options)
    except (OSError, ValueError):
        # the hub's client would retry for half a minute
        if Path(place).is_dir() or not hub_answers():
            raise
    return kind.from_pretrained(place, **options)


def hub_answers() -> bool:
    """Return whether the hub is reachable: one request, 5 s limit; proxies are respected."""
    try:
        urllib.request.urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def _explain_failure(name: str) -> str:
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


def tokenise(corpus: Corpus, data: Part, name: str, vocabulary: int, wanted: int) -> tuple[np.ndarray, str]:
    """Return (1-D int64 tokens, how they were made) from the training documents.

    Documents are in their hashed order, with end-of-text tokens between them. Bytes if the model has no tokenizer.

    Args:
        corpus: the prepared text.
        data: its part of the spec, for messages.
        name: the model.
        vocabulary: size of the model's vocabulary.
        wanted: number of tokens; reading stops once reached.

    Raises:
        ValueError: the data are not text, or neither tokenizer nor bytes fit the model.
    """
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


def load_tokenizer(name: str, probe: str = _PROBE) -> Any | None:
    """Return the model's tokenizer, or None.

    None also for an empty tokenizer invented by transformers from the configuration.
    """
    try:
        tokenizer = _from_pretrained(_transformers().AutoTokenizer, name)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError):
        return None
    # an empty tokenizer maps all of `probe` to unknown
    return tokenizer if len(set(tokenizer(probe, add_special_tokens=False)["input_ids"])) > 1 else None


def _documents(corpus: Corpus) -> Iterator[str]:
    """Yield the training texts: bytes between separators, a value absent from any text."""
    tokens = np.asarray(corpus.train_tokens)
    ends = np.append(np.flatnonzero(tokens == ByteTokenizer.separator), len(tokens))
    start = 0
    for end in ends:
        yield ByteTokenizer().decode(tokens[start:end])
        start = int(end) + 1


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        import transformers
    except ImportError:
        raise RuntimeError("hf=… needs transformers, which is not installed; pip install transformers") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
