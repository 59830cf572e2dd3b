"""Specs of `stability.deploy` and `stability.infer`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from stability.config.base import Settings
from stability.config.identity import Place

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
