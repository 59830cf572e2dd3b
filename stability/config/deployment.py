"""Specs of `stability.embed`, `stability.deploy` and `stability.infer`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from stability.config.base import Settings
from stability.config.identity import Place
from stability.config.parts import Part, one_part

Mode = Literal["encode", "similarity", "search", "cluster", "export"]
# settings of one mode or several; those of no other mode may be given
OF_MODE = {
    "query": ("similarity", "search"),
    "queries": ("search",),
    "text": ("similarity",),
    "k": ("search",),
    "clusters": ("cluster",),
    "seed": ("cluster",),
    "out": ("encode", "cluster", "export"),
    "input": ("encode", "similarity", "search", "cluster"),
    "data": ("encode", "search", "cluster"),
}


class EmbedSpec(Settings):
    """The settings of `stability.embed`: embeddings of texts by a trained model, and what is asked of them."""

    mode: Mode = Field(
        description="encode: write embeddings; similarity: cosines of pairs; search: nearest texts; cluster: k-means; "
        "export: a folder of sentence-transformers",
    )
    ckpt: Annotated[str | None, Place()] = Field(
        default=None, min_length=1, description="a run's folder, a checkpoint's, or that of a study with one run"
    )
    dir: Annotated[str | None, Place()] = Field(
        default=None, min_length=1, description="an exported folder, or any folder of sentence-transformers"
    )
    plugins: tuple[str, ...] = Field(default=(), description="modules of your own that the run was trained with")
    input: Annotated[str | None, Place()] = Field(
        default=None,
        min_length=1,
        description="UTF-8 file with a text per line (similarity: two texts with a tab between)",
    )
    data: Annotated[Part, one_part("data")] | None = Field(
        default=None, description="sentence data whose second sentences are the texts, instead of input"
    )
    query: Annotated[str | None, Place()] = Field(
        default=None, min_length=1, description="text to search for, or to compare with text (similarity)"
    )
    queries: Annotated[str | None, Place()] = Field(
        default=None, min_length=1, description="UTF-8 file with a query per line (search)"
    )
    text: Annotated[str | None, Place()] = Field(
        default=None, min_length=1, description="text to compare with query (similarity)"
    )
    k: int = Field(default=5, ge=1, le=1000, description="texts found for each query (search)")
    clusters: int = Field(default=8, ge=2, le=10_000, description="number of clusters (cluster)")
    seed: int = Field(default=0, ge=0, description="seed of the clusters' starts (cluster)")
    out: Annotated[str | None, Place()] = Field(
        default=None, min_length=1, description="new folder to write (encode, export; cluster: null writes nothing)"
    )
    batch: int = Field(default=64, ge=1, description="texts per pass of the model")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda where there is one")

    @model_validator(mode="after")
    def _check_mode(self) -> EmbedSpec:
        """Refuse a missing or second source, missing texts, and settings of another mode."""
        if (self.ckpt is None) == (self.dir is None):
            given = "neither" if self.ckpt is None else "both"
            raise ValueError(f"give either ckpt=RUN or dir=FOLDER ({given} given)")
        for name, modes in OF_MODE.items():
            if self.mode not in modes and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name}={getattr(self, name)} belongs to mode={' or '.join(modes)}, and this is mode={self.mode}"
                )
        if self.mode in ("encode", "export") and self.out is None:
            raise ValueError(f"out: a value is missing; mode={self.mode} writes out=FOLDER")
        if self.mode == "export" and self.ckpt is None:
            raise ValueError(f"dir={self.dir} is exported already; mode=export takes ckpt=RUN")
        for name in ("query", "text"):
            if (given := getattr(self, name)) is not None and not given.strip():
                raise ValueError(f"{name}={given!r} is blank; give a text")
        self._check_texts()
        return self

    def _check_texts(self) -> None:
        if self.mode == "similarity":
            is_pair = self.query is not None and self.text is not None
            if (self.query is None) != (self.text is None) or is_pair == (self.input is not None):
                raise ValueError("mode=similarity takes either query=TEXT text=TEXT, or input=FILE of pairs")
            return
        if self.mode != "export" and (self.input is None) == (self.data is None):
            given = "neither" if self.input is None else "both"
            raise ValueError(f"mode={self.mode} takes either input=FILE or data=stdlib_pairs ({given} given)")
        if self.mode == "search" and (self.query is None) == (self.queries is None):
            given = "neither" if self.query is None else "both"
            raise ValueError(f"mode=search takes either query=TEXT or queries=FILE ({given} given)")


# Largest accepted |ΔNLL| / NLL by format. ternary: BitLinear computes W + (W̃ − W), which is W̃ but for rounding.
TOLERANCES = {"fp32": 0.0, "bf16": 1e-3, "int8": 5e-3, "ternary": 1e-5}


class DeploySpec(Settings):
    """The settings of `stability.deploy`: a checkpoint, and how its tensors are stored."""

    ckpt: Annotated[str, Place()] = Field(
        min_length=1, description="a checkpoint folder, a run's folder, or a study's folder: its run of the lowest NLL"
    )
    format: Literal["fp32", "bf16", "int8", "ternary"] = Field(
        description="of the linear maps of mixers and feed-forward networks; ternary needs linear=bitnet"
    )
    out: Annotated[str | None, Place()] = Field(
        default=None, min_length=1, description="folder to write; null: deployed/RUN_FORMAT"
    )
    overwrite: bool = Field(default=False, description="whether a deployed model in that folder is replaced")
    plugins: tuple[str, ...] = Field(default=(), description="modules of your own that the run was trained with")
    rest: Literal["fp32", "bf16"] = Field(
        default="bf16", description="of all other tensors of two or more axes; vectors stay fp32 (int8, ternary)"
    )
    head: Literal["rest", "int8"] = Field(
        default="rest", description="int8: tables of the embedding and the head in int8, too (int8)"
    )
    pack: Literal["2bit", "base3"] = Field(
        default="2bit", description="2bit: four weights a byte; base3: five, 1.6 bits a weight (ternary)"
    )
    force: bool = Field(
        default=False, description="whether dense maps are made ternary, and the tolerance is not applied (ternary)"
    )
    tolerance: float | None = Field(
        default=None,
        ge=0,
        description="largest |ΔNLL| as a share of the NLL; null: fp32 0, bf16 0.001, int8 0.005, ternary 0.00001, or "
        "0.001 with rest=bf16",
    )

    @property
    def limit(self) -> float | None:
        """Largest accepted |ΔNLL| / NLL; None: any."""
        if self.force or self.tolerance is not None:
            return self.tolerance
        is_rounded = self.format == "ternary" and self.rest == "bf16"
        return TOLERANCES["bf16" if is_rounded else self.format]

    @model_validator(mode="after")
    def _check_read(self) -> DeploySpec:
        """Refuse settings of another format."""
        owners = {"rest": ("int8", "ternary"), "head": ("int8",), "pack": ("ternary",), "force": ("ternary",)}
        for key, formats in owners.items():
            value = getattr(self, key)
            if self.format not in formats and value != type(self).model_fields[key].default:
                shown = str(value).lower() if isinstance(value, bool) else value
                raise ValueError(f"{key}={shown} belongs to format={' and '.join(formats)}; leave it out")
        return self


def _split_folders(value: Any) -> Any:
    """Return a tuple of folders, also for a single one."""
    return (value,) if isinstance(value, str) else value


class InferSpec(Settings):
    """The settings of `stability.infer`: a deployed model, and what it answers."""

    dir: Annotated[tuple[str, ...], BeforeValidator(_split_folders), Place()] = Field(
        min_length=1, description="a folder of stability.deploy; several are compared by benchmark=true"
    )
    text: Annotated[str | None, Place()] = Field(
        default=None, description="text to continue or to fill; letters of DNA or a protein; the path of an image"
    )
    input: Annotated[str | None, Place()] = Field(
        default=None,
        min_length=1,
        description='a .jsonl file with {"text": …} in each line, any other file with a text a line, or - for JSON '
        "lines of the standard input",
    )
    output: Annotated[str | None, Place()] = Field(
        default=None, min_length=1, description="file of the answers as JSON lines (input); null: standard output"
    )
    interactive: bool = Field(default=False, description="whether texts are read from the terminal, a line each")
    benchmark: bool = Field(default=False, description="whether speed and memory are measured instead")
    plugins: tuple[str, ...] = Field(default=(), description="modules of your own that the run was trained with")
    num: int = Field(default=1, ge=1, le=4096, description="continuations of each text (ar)")
    tokens: int = Field(default=64, ge=0, description="tokens of a continuation (ar); 0: the text's NLL alone")
    temperature: float = Field(
        default=1.0, ge=0, description="divisor of the tokens' log-probabilities; 0: always the likeliest (ar)"
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="share of the probability that is drawn from, the likeliest tokens (ar)"
    )
    top: int = Field(default=5, ge=1, description="likeliest tokens or classes that are listed (mlm, classify)")
    mask: str = Field(
        default="[MASK]", min_length=1, description="what stands for a token to fill in a text; of letters _ (mlm)"
    )
    seed: int = Field(default=0, ge=0, description="seed of the continuations (ar)")
    repeats: int = Field(default=5, ge=1, description="measurements, of which the median is printed (benchmark)")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda where there is one")

    @model_validator(mode="after")
    def _check_task(self) -> InferSpec:
        tasks = {
            "text": self.text is not None,
            "input": self.input is not None,
            "interactive": self.interactive,
            "benchmark": self.benchmark,
        }
        given = [name for name, is_given in tasks.items() if is_given]
        if len(given) != 1:
            told = f"{' and '.join(given)} are given" if given else "none is given"
            raise ValueError(f"give one of text=…, input=FILE, interactive=true and benchmark=true; {told}")
        if self.output is not None and self.input is None:
            raise ValueError(f"output={self.output} belongs to input=FILE; add it, or leave output out")
        if len(self.dir) > 1 and not self.benchmark:
            raise ValueError(f"dir: {len(self.dir)} folders are compared by benchmark=true only; give one")
        return self
