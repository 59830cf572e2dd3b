"""The golden list of ids: ``python -m tests.identity.golden_ids`` writes it, with the code that is there, into
``golden/``.

The list that is committed was written by the code of commit 2428c84, before what makes an id was declared at the
fields. It is never written again for what it holds: whoever adds a setting adds cases of their own
(`tests/config/test_run_id.py`), since these say what runs on disk are called.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from stability.config.base import validate
from stability.config.identity import run_id, tokenizer_id
from stability.config.parse import parse_run
from stability.config.parts import part as part_of
from stability.config.run import RunSpec
from stability.config.tokenizer import TokenizerRunSpec
from stability.registry import Registry, add_plugin
from tests.reading import compose, read_spec

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
FINGERPRINT = "f" * 64
TOKENIZER = "0123456789ab"
PLUGINS = [f"tests.identity.plugins.{name}" for name in ("elsewhere", "lazy_adam", "stack")]
# what a preset's data and objective cannot do without
NEEDED = {"text_mini": "data.path=README.md", "attentionx_gpt_mini": "data.path=README.md"}
NEEDED |= {
    f"protein_{size}": f"objective.tokenizer={TOKENIZER}" for size in ("mini", "readings", "35m", "133m", "320m")
}

BASE: dict[str, Any] = {
    "model": {"name": "nano", "layers": 4, "width": 64, "heads": 4, "positions": 128},
    "objective": "mlm",
    "data": "stdlib",
    "mechanism": "sa",
    "residual": "identity",
    "optimizer": "adamw",
    "norm": "layernorm",
    "schedule": {"name": "constant"},
    "steps": 200,
    "batch": 8,
    "clip_norm": 1.0,
    "lr_peak": 1e-3,
    "seed": 0,
    "data_fingerprint": FINGERPRINT,
}
SIZE = {"layers": 2, "width": 96, "heads": 4}
TOKENIZER_BASE: dict[str, Any] = {
    "data": "protein",
    "mechanism": "sa",
    "cross": "auto",
    "optimizer": "adamw",
    "frame": "principal",
    "levels": [7, 5, 5, 5, 5],
    "encoder": SIZE,
    "decoder": SIZE,
    "atom_decoder": SIZE,
    "kernel": 5,
    "positions": 96,
    "steps": 2000,
    "atom_steps": 1000,
    "batch": 16,
    "lr_peak": 2e-3,
    "warmup_steps": 50,
    "clip_norm": 1.0,
    "every_steps": 250,
    "chains": 64,
    "seed": 0,
    "data_fingerprint": FINGERPRINT,
}


def preset(name: str, changes: Sequence[str] = ()) -> list[RunSpec]:
    """Every run of ``study=name``, as the command line makes it with these ``changes``."""
    extra = [NEEDED[name]] if name in NEEDED else []
    return list(read_spec("sweep", [f"study={name}", *extra, *changes]).expand(FINGERPRINT))


def presets() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (ROOT / "conf" / "study").glob("*.yaml")))


def sum_of(ids: list[str]) -> str:
    return hashlib.sha256("\n".join(ids).encode()).hexdigest()


def written(names: Iterable[str]) -> dict[str, Any]:
    """Of each preset the number of its runs, the sha256 over their ids in order, and of one run of each kind all values
    (as changes of the first's)."""
    found = {}
    for name in names:
        runs = preset(name)
        first = runs[0].model_dump(mode="json")
        kinds: dict[str, Any] = {}
        for run in runs:
            values = run.model_dump(mode="json")
            kind = json.dumps(
                {key: values[key] for key in ("mechanism", "residual", "optimizer", "norm", "ffn", "cross")},
                sort_keys=True,
            )
            kinds.setdefault(
                kind,
                {"changes": {key: value for key, value in values.items() if value != first[key]}, "id": run_id(run)},
            )
        found[name] = {
            "num": len(runs),
            "sha256": sum_of([run_id(run) for run in runs]),
            "first": first,
            "kinds": list(kinds.values()),
        }
    return found


def others(field: Any, value: Any) -> Iterator[Any]:
    """Values of a field beside the one that it has; many will not be valid."""

    def choices(annotation: Any) -> list[Any]:
        if get_origin(annotation) is Literal:
            return list(get_args(annotation))
        return [item for inner in get_args(annotation) for item in choices(inner)]

    yield from (choice for choice in choices(field.annotation) if choice != value)
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value + 2, max(0, value - 1))
    elif isinstance(value, float):
        yield from (value * 0.5, value * 2 + 0.25)
    elif value is None:
        yield from (3, 0.25, "somewhere/else", True)
    elif isinstance(value, str):
        yield "somewhere/else"


def nested(
    values: dict[str, Any], config: Any, of: str, outer: dict[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """``{of: values with one field changed}`` for every field."""
    for key, field in config.model_fields.items():
        given = values.get(key, None if field.is_required() else field.get_default(call_default_factory=True))
        yield from ({**(outer or {}), of: {**values, key: other}} for other in others(field, given))


BESIDES: list[dict[str, Any]] = [
    {},
    {"model": {**BASE["model"], "name": "other"}},
    {"model": {**BASE["model"], "ffn_multiple": 1.0, "qk_bias": 2.0}},
    {"schedule": {"name": "cosine", "warmup_steps": 10, "final_ratio": 0.0}},
    {"checkpoint": {"every_steps": 50}},
    {"checkpoint": {"every_steps": 50, "keep_last": 2, "keep_best": 1}},
    {"guards": {"on_nonfinite": "skip_step", "retries": 3}},
    {"guards": {"on_nonfinite": "restore_last_good", "retries": 2, "check_every": 5}},
    {"guards": {"post_clip_norm": 0.5}},
    {"objective": {"name": "mlm", "context": 16}, "cross": "ca"},
    {"objective": {"name": "mlm", "context": 16}, "cross": "cc", "mechanism": "sc"},
    {
        "objective": {"name": "mlm", "context": 16},
        "cross": {"name": "cc", "window": 3, "iterations": 2, "step": "learned"},
    },
    {"mechanism": {"name": "mix", "pattern": ["sc", "sa"], "sc": {"rank": 2}}},
    {"mechanism": {"name": "mix", "pattern": ["sa", "sw", "sc"], "sc": {"graph": "cycle"}, "sw": {"window": 5}}},
    {"mechanism": {"name": "mix", "sc": {"iterations": 3, "step": "learned"}}},
    {"data": {"name": "text", "path": "/one/place/a.txt"}},
    {"data": {"name": "text", "path": "/another/b (c).txt", "tokenizer": "gpt2", "ranks": "/ranks", "keep": 100}},
    {"data": {"name": "text", "path": "a", "field": "body"}},
    {"data": {"name": "hf", "dataset": "Skylion007/openwebtext"}},
    {
        "data": {
            "name": "hf",
            "dataset": "wikitext",
            "subset": "wikitext-103-raw-v1",
            "split": "validation",
            "field": "page",
            "max_documents": 7,
        }
    },
    {
        "data": {
            "name": "hf",
            "dataset": "wikitext",
            "revision": "refs/convert/parquet",
            "tokenizer": "gpt2",
            "ranks": "/r",
            "keep": 9,
        }
    },
    {
        "data": {
            "name": "hf",
            "dataset": "InstaDeepAI/human_reference_genome",
            "tokenizer": "nucleotides",
            "reverse_complement": True,
        }
    },
    {"data": {"name": "hf", "dataset": "a.b-c_d/E.f-g_h"}},
    {"data": {"name": "dna", "path": None}},
    {"data": {"name": "dna", "path": "/genome", "hold_out": "region", "reverse_complement": True}},
    {"objective": "ar", "data": {"name": "text", "path": "b"}},
    {"objective": "classify", "data": "images"},
    {"objective": "classify", "data": {"name": "images", "path": "/pictures", "hold_out": 0.1}},
    *({"objective": {"name": name, "loss_chunk": 64}} for name in ("mlm", "ar", "score_entropy")),
    {"objective": {"name": "multitrack", "sources": ["sequence"], "contexts": []}, "data": "protein"},
    {"objective": {"name": "multitrack", "tokenizer": TOKENIZER}, "data": "protein", "cross": "auto"},
    {
        "objective": {"name": "multitrack", "sources": ["sequence"]},
        "data": {
            "name": "protein",
            "path": "/structures",
            "annotations": "/annotations/a(b),c/x.tsv",
            "plddt": "always",
            "min_residues": 20,
            "held_out": 0.1,
        },
        "cross": "cc",
        "mechanism": "mix",
    },
    {
        "data": {"name": "elsewhere", "path": "/mine", "annotations": "/mine.tsv", "keep": 4, "part": "half"},
        "plugins": PLUGINS,
    },
    {"data": {"name": "elsewhere"}, "plugins": PLUGINS[:1]},
    {"optimizer": "lazy_adam", "plugins": PLUGINS},
    {"optimizer": {"name": "lazy_adam", "decay": "matrices", "patience": 5}, "plugins": PLUGINS},
    {"mechanism": "stack", "plugins": PLUGINS},
]


def changes() -> Iterator[dict[str, Any]]:
    """Of `BASE`: every field of the spec and of every part, one at a time; and what `BESIDES` lists."""
    yield from BESIDES
    for key in (
        "steps",
        "batch",
        "microbatch",
        "clip_norm",
        "threads",
        "lr_peak",
        "seed",
        "behaviour",
        "data_fingerprint",
    ):
        field = RunSpec.model_fields[key]
        yield from ({key: other} for other in others(field, BASE.get(key, field.default)))
    for key in ("model", "schedule", "evaluation", "checkpoint", "verdict", "guards", "log"):
        yield from nested(BASE.get(key, {}), RunSpec.model_fields[key].annotation, key)
    fitting: dict[str, dict[str, Any]] = {"classify": {"data": "images"}, "images": {"objective": "classify"}}
    protein = {"name": "multitrack", "sources": ["sequence"], "contexts": []}
    fitting |= {"multitrack": {"data": "protein"}, "protein": {"objective": protein}}
    needed: dict[str, dict[str, Any]] = {"text": {"path": "a"}, "hf": {"dataset": "a/b"}, "multitrack": protein}
    families = {
        "mechanism": "mechanisms",
        "residual": "residuals",
        "optimizer": "optimizers",
        "norm": "norms",
        "ffn": "ffns",
        "position": "positions",
        "linear": "linears",
        "objective": "objectives",
        "data": "data",
    }
    for key, family in families.items():
        for name in Registry(family).names(**({"cross": False, "trainable": True} if family == "mechanisms" else {})):
            if name in ("elsewhere", "lazy_adam", "stack"):
                continue
            outer = fitting.get(name, {})
            outer = {**outer, **({"objective": "ar"} if outer == {} and name in ("attentionx",) else {})}
            values = {"name": name, **needed.get(name, {})}
            yield {**outer, key: values}
            yield from nested(values, Registry(family).load(name).Config, key, outer)
    context = {"objective": {"name": "mlm", "context": 16}}
    for name in Registry("mechanisms").names(cross=True):
        yield from nested({"name": name}, Registry("mechanisms").load(name).Config, "cross", context)
    for part in ("hc", "mhc", "mhc_lite"):
        yield {"residual": part, "norm": "rmsnorm", "objective": "score_entropy"}


def tokenizer_changes() -> Iterator[dict[str, Any]]:
    yield {}
    yield {"data": {"name": "protein", "path": "/structures", "annotations": "/a.tsv", "held_out": 0.2}}
    yield {"data": {"name": "text", "path": "a"}}
    yield {"mechanism": {"name": "mix", "sc": {"graph": "cycle"}}}
    yield {"mechanism": "mix", "cross": {"name": "cc", "iterations": 2}}
    yield {"atom_steps": 0, "cross": None}
    yield {"cross": "ca"}
    for key, field in TokenizerRunSpec.model_fields.items():
        if key in ("data", "mechanism", "optimizer", "norm", "ffn", "cross"):
            continue
        if key in ("encoder", "decoder", "atom_decoder"):
            yield from nested(SIZE, field.annotation, key)
        else:
            yield from ({key: other} for other in others(field, TOKENIZER_BASE.get(key, field.default)))
    for key, family in (("mechanism", "mechanisms"), ("optimizer", "optimizers")):
        for name in ("sa", "sc", "sw", "attentionx") if key == "mechanism" else ("adamw", "sgd"):
            yield {key: name}
            yield from nested({"name": name}, Registry(family).load(name).Config, key)


def cases(of: Iterator[dict[str, Any]], base: dict[str, Any], spec_of: Any, id_of: Any) -> list[dict[str, Any]]:
    """Those that are valid, each once."""
    found: dict[str, dict[str, Any]] = {}
    for change in of:
        try:
            found.setdefault(
                json.dumps(change, sort_keys=True), {"changes": change, "id": id_of(spec_of(base | change))}
            )
        except ValueError:
            continue
    return list(found.values())


def run_of(values: dict[str, Any]) -> RunSpec:
    return parse_run(with_former_defaults(values))


def tokenizer_of(values: dict[str, Any]) -> TokenizerRunSpec:
    return validate(TokenizerRunSpec, with_former_defaults(values))


def with_former_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """The values with the defaults of the list's time where they have changed since: sc and cc turned absolutely. (Files
    on disk hold every value.)"""
    whole = dict(values)
    for key in ("mechanism", "cross"):
        part = whole.get(key)
        part = {"name": part} if isinstance(part, str) else part
        name = part["name"] if part else ""
        if name in ("sc", "cc"):
            whole[key] = {"rope": "absolute", **part}
        elif name == "mix":
            whole[key] = {**part, "sc": {"rope": "absolute", **part.get("sc", {})}}
        elif name == "stack":
            sc = part_of("mechanisms", {"name": "sc", "rope": "absolute"})
            whole[key] = {"parts": (part_of("mechanisms", "sa"), sc), **part}
        elif name == "auto":
            whole[key] = {**part, "cc": {"rope": "absolute"}}
    return whole


def write(name: str, value: Any) -> None:
    """A line for each case."""
    (GOLDEN / f"{name}.json").write_text(
        json.dumps(value, indent=None, separators=(",", ":"))
        .replace('{"changes"', '\n{"changes"')
        .replace('"first"', '\n"first"')
        + "\n"
    )


def main() -> None:
    for module in PLUGINS:
        add_plugin(module)
    GOLDEN.mkdir(exist_ok=True)
    write("presets", written(presets()))
    write("runs", cases(changes(), BASE, run_of, run_id))
    defaults = {
        key: value for key, value in compose("train_tokenizer", []).items() if key in TokenizerRunSpec.model_fields
    }
    assert set(defaults) | {"data_fingerprint"} >= set(TOKENIZER_BASE), set(TOKENIZER_BASE) - set(defaults)
    write("tokenizers", cases(tokenizer_changes(), TOKENIZER_BASE, tokenizer_of, tokenizer_id))


if __name__ == "__main__":
    main()
