"""A trained encoder as a folder that sentence-transformers loads, and that `stability.embed` reads without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from stability.build import build_model
from stability.config.parse import parse_run
from stability.config.run import RunSpec
from stability.models.backbone import Backbone
from stability.printable import line_of
from stability.runs.directory import replace_folder
from stability.training.checkpoint import MODEL, sha256_of

OURS = "stability.json"  # spec, format of the data and sha256 of the weights
LIBRARY = "sentence_transformers"
MODULES = (
    ("", "stability.sentences.st_module.Encoder"),
    ("1_Pooling", f"{LIBRARY}.sentence_transformer.modules.pooling.Pooling"),
    ("2_Normalize", f"{LIBRARY}.base.modules.normalize.Normalize"),
)


def write(folder: Path, spec: RunSpec, model: nn.Module, data_format: Any) -> None:
    """Write the folder atomically: our spec and weights, and the library's description of the modules.

    Loading it by the library needs this project installed, and ``trust_remote_code=True``: since version 6.0 the
    library asks for it before it imports a module that is not its own. The folder itself holds no code.

    Args:
        folder: the target.
        spec: the run.
        model: its trained model.
        data_format: format of its corpus.
    """
    settings: Any = spec.objective.settings
    modules = MODULES if settings.normalise else MODULES[:2]
    described = [
        {"idx": number, "name": str(number), "path": path, "type": kind} for number, (path, kind) in enumerate(modules)
    ]
    pooling = {"embedding_dimension": spec.model.width, "pooling_mode": settings.pooling, "include_prompt": True}
    with replace_folder(folder) as aside:
        write_weights(aside, spec, model, data_format)
        _write_json(aside / "modules.json", described)
        whole = {"model_type": "SentenceTransformer", "similarity_fn_name": "cosine"}
        _write_json(aside / "config_sentence_transformers.json", whole)
        _write_json(aside / "1_Pooling" / "config.json", pooling)
        if settings.normalise:
            name = "sentence_embedding"
            _write_json(aside / "2_Normalize" / "config.json", {"module_input_name": name, "module_output_name": name})


def write_weights(folder: Path, spec: RunSpec, model: nn.Module, data_format: Any) -> None:
    """Write weights, spec and format into an existing folder.

    Args:
        folder: the folder.
        spec: the run.
        model: its trained model.
        data_format: format of its corpus.
    """
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    (folder / MODEL).write_bytes(save(state))  # not `save_file`, whose files only their owner may read
    content = {"spec": spec.model_dump(mode="json"), "format": data_format, "sha256": sha256_of(folder / MODEL)}
    _write_json(folder / OURS, content)


def load(folder: Path) -> tuple[RunSpec, Backbone, Any]:
    """Return (spec, model in evaluation mode, format of the data) of an exported folder.

    Raises:
        ValueError: a file is missing or altered; the message names it.
    """
    try:
        content = json.loads((folder / OURS).read_text(encoding="utf-8"))
        spec_values, data_format, digest = content["spec"], content["format"], content["sha256"]
        if not isinstance(spec_values, dict) or not isinstance(data_format, dict):
            raise TypeError("spec or format is no object")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / OURS} is missing or damaged ({line_of(error)}); export the run again") from None
    if not (folder / MODEL).is_file() or sha256_of(folder / MODEL) != digest:
        raise ValueError(f"{folder / MODEL} is missing or altered; export the run again")
    try:
        spec = parse_run(spec_values, folder)
    except ValueError as error:
        raise ValueError(f"{folder / OURS} holds no valid run ({line_of(error)}); export the run again") from None
    try:
        model = build_model(spec, data_format)
        model.load_state_dict(load_file(folder / MODEL))
    except (SafetensorError, RuntimeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / MODEL} does not fit the model of {OURS}: {line_of(error)}") from None
    return spec, model.eval(), data_format


def _write_json(file: Path, content: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")
