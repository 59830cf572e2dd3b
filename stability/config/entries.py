"""Specs of `stability.hessian`, `stability.report`, `stability.status` and `stability.probe`.

The spec of `stability.generate` is in `stability.config.generation`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from stability.config.base import STUDY_NAME, Settings
from stability.config.curvature import CurvatureSpec
from stability.config.identity import Place
from stability.config.parts import Part, one_part, some_parts
from stability.config.rates import LearningRates
from stability.config.training import PROJECT
from stability.registry import Registry


class HessianSpec(Settings):
    """The settings of `stability.hessian`.

    It measures α_max of existing checkpoints (``ckpt``), or of a Hugging Face causal LM on the user's data (``hf``).
    """

    written_flat: ClassVar[str | None] = "curvature"
    ckpt: Annotated[str | None, Place()] = Field(
        default=None, min_length=1, description="a checkpoint folder, a run's folder or a study's folder"
    )
    plugins: tuple[str, ...] = Field(default=(), description="modules of your own that the runs were trained with")
    hf: Annotated[str | None, Place()] = Field(
        default=None, min_length=1, description="a Hugging Face causal language model: a folder, or a name on the hub"
    )
    data: Annotated[Part, one_part("data")] | None = Field(
        default=None, description="the text that the model is to be fine-tuned on (hf)"
    )
    lr: LearningRates | None = Field(default=None, description="learning rates to compare with α_max (hf)")
    positions: int | None = Field(
        default=None, ge=2, description="tokens per sequence (hf); null: 128, or the model's largest where that is less"
    )
    curvature: CurvatureSpec = Field(
        default=CurvatureSpec(), description="the protocol; its keys are written flat, e.g. batch=512"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda where there is one")
    tables: Literal["best", "all"] = Field(
        default="best", description="what is printed of a study: α_max at the best rates, or every table"
    )

    @model_validator(mode="before")
    @classmethod
    def _nest_protocol(cls, values: Any) -> Any:
        """Put keys that are no field of this spec into ``curvature``; a dumped spec has none."""
        if not isinstance(values, dict) or values.keys() <= cls.model_fields.keys():
            return values
        own = {key: value for key, value in values.items() if key in cls.model_fields and key != "curvature"}
        return own | {"curvature": {key: value for key, value in values.items() if key not in own}}

    @model_validator(mode="after")
    def _check_subject(self) -> HessianSpec:
        """Refuse anything but one of ckpt and hf, and settings that do not apply to it."""
        if (self.ckpt is None) == (self.hf is None):
            given = "neither" if self.ckpt is None else "both"
            raise ValueError(
                f"give either ckpt=FOLDER or hf=NAME_OR_PATH ({given} given); e.g. ckpt=runs/studies/quickstart, or "
                "hf=gpt2 data=text …"
            )
        for key in ("data", "lr", "positions"):
            if self.ckpt is not None and getattr(self, key) is not None:
                raise ValueError(f"{key} belongs to hf=…; a checkpoint carries its own {key}")
        for key, example in (("data", "data=text data.path=FILE_OR_FOLDER"), ("lr", "lr=2e-5")):
            if self.hf is not None and getattr(self, key) is None:
                raise ValueError(f"{key}: a value is missing; hf={self.hf} needs {example}")
        if self.lr is not None and self.lr.scaled:
            raise ValueError("lr.scaled=true works in a sweep only; give the rates themselves, e.g. lr=[1e-5,1e-4]")
        if self.lr is not None and self.lr.edge is not None:
            raise ValueError("lr=edge works in a sweep only; give the rates themselves, e.g. lr=[1e-5,1e-4]")
        if self.hf is not None and self.curvature.measure != ("alpha_max",):
            raise ValueError(
                f"measure=[{','.join(self.curvature.measure)}] belongs to ckpt=…; of a Hugging Face model only "
                "alpha_max is measured"
            )
        if self.hf is not None and self.curvature.precision != "float32":
            raise ValueError(f"precision={self.curvature.precision} belongs to ckpt=…; leave it out with hf=…")
        if self.hf is not None and self.curvature.phase != "terminal":
            raise ValueError(f"phase={self.curvature.phase} belongs to ckpt=…; a Hugging Face model has one state only")
        return self


def _split_names(value: Any) -> Any:
    """Split the text ``[a,b]`` at its commas; a name may be a path, so the value is not parsed as YAML."""
    if not isinstance(value, str):
        return value
    return (
        tuple(name.strip() for name in value[1:-1].split(","))
        if value.startswith("[") and value.endswith("]")
        else (value,)
    )


OF_FIGURES, OF_TABLES = ("png", "svg"), ("csv", "latex", "markdown", "md", "parquet", "tex")  # types of format=files


def _split_formats(value: Any) -> Any:
    """Split a list of formats; the types of files that ``format=files`` writes are refused by its name."""
    formats = _split_names(value)
    for name in formats if isinstance(formats, list | tuple) else ():
        if name in OF_FIGURES or name in OF_TABLES:
            which = (
                "figures as PDF, SVG and PNG" if name in OF_FIGURES else "tables as CSV, Markdown, LaTeX and parquet"
            )
            raise ValueError(f"format={name}: format=files writes {which}; give format=files")
    return formats


class ReportSpec(Settings):
    """The settings of `stability.report`: tables, figures and PDF of studies."""

    name: Annotated[tuple[str, ...], BeforeValidator(_split_names), Place()] = Field(
        min_length=1, description="studies' names under runs_dir/studies, or their folders"
    )
    together: str | None = Field(
        default=None,
        pattern=STUDY_NAME,
        description="name of one PDF or page about all studies; null: one for each study",
    )
    layout: Literal["study", "paper"] = Field(
        default="study",
        description=(
            "study: each study's own sections; paper: one report of all of them in the papers' tables and figures, "
            "model sizes × modalities"
        ),
    )
    format: Annotated[tuple[Literal["pdf", "html", "files"], ...], BeforeValidator(_split_formats)] = Field(
        default=("pdf",),
        min_length=1,
        description=(
            "what is written: pdf; html, one page for the browser with figures to zoom into; files, each table as CSV, "
            "Markdown, LaTeX and parquet and each figure as PDF, SVG and PNG, in a folder named after the study"
        ),
    )
    tables: Literal["best", "all"] = Field(
        default="best", description="what is printed: the best rates in 25 lines, or every table"
    )
    pages: Literal["short", "all"] = Field(
        default="short",
        description=(
            "pages of the PDF: short, the answer, α_max and learning curves, and one table of each further section; "
            "all, every table and figure"
        ),
    )
    caption: Literal["short", "long"] = Field(
        default="short",
        description="captions of the LaTeX tables (files): short, the title; long, notes and the data's source, too",
    )
    reference: str | None = Field(
        default=None,
        min_length=1,
        description="mechanism that the others are compared with; null: as in the sweep",
    )
    runs_dir: Annotated[str, Place()] = Field(default="runs", min_length=1, description="folder of the pool of runs")
    reports_dir: Annotated[str, Place()] = Field(
        default="reports", min_length=1, description="folder of the written files"
    )

    @model_validator(mode="after")
    def _check_caption(self) -> ReportSpec:
        if self.caption == "long" and "files" not in self.format:
            raise ValueError("caption=long applies to the LaTeX tables of format=files; add format=files")
        return self


class TargetSize(Settings):
    """The size of a model that was not swept; what is null is as at the largest size of the sweep."""

    width: int | None = Field(default=None, ge=1, description="its width; null: the largest swept one")
    layers: int | None = Field(default=None, ge=1, description="its number of layers; null: the largest swept one")
    steps: int | None = Field(default=None, ge=1, description="its training steps; null: the largest swept number")
    batch: int | None = Field(default=None, ge=1, description="its sequences per step; null: the largest swept number")

    def list_given(self) -> dict[str, int]:
        """Return the values that are not null."""
        return {name: value for name, value in self.model_dump().items() if value is not None}


class TransferSpec(Settings):
    """The settings of `stability.transfer`: studies of several sizes, and the size to predict."""

    name: Annotated[tuple[str, ...], BeforeValidator(_split_names), Place()] = Field(
        min_length=1, description="studies' names under runs_dir/studies, or their folders; several make one law"
    )
    target: TargetSize = Field(default=TargetSize(), description="the size to predict the best learning rate of")
    runs_dir: Annotated[str, Place()] = Field(default="runs", min_length=1, description="folder of the pool of runs")

    @model_validator(mode="after")
    def _check_target(self) -> TransferSpec:
        if not self.target.list_given():
            raise ValueError(
                "target: a size is missing; give target.width=…, target.layers=…, target.steps=… or target.batch=…"
            )
        return self


def _parse_interval(value: Any) -> Any:
    """Return the seconds between refreshes; ``watch=true`` means 2 s, ``watch=false`` None."""
    return (2.0 if value else None) if isinstance(value, bool) else value


def _check_clean(value: Any) -> Any:
    """Refuse ``clean=NAME``, which is delete=NAME."""
    if isinstance(value, str) and value != "unlisted":
        raise ValueError(f"clean={value}: must be unlisted; delete={value} removes the study {value}")
    return value


class StatusSpec(Settings):
    """The settings of `stability.status`: progress of one or all studies of a pool, and removal of unlisted runs."""

    name: Annotated[str | None, Place()] = Field(
        default=None,
        min_length=1,
        description="a study's name under runs_dir/studies, or its folder; null: all of them, a line each",
    )
    runs_dir: Annotated[str, Place()] = Field(default="runs", min_length=1, description="folder of the pool of runs")
    watch: Annotated[float | None, BeforeValidator(_parse_interval)] = Field(
        default=None, gt=0, description="seconds between refreshes, until the study has ended; true: 2"
    )
    clean: Annotated[Literal["unlisted"] | None, BeforeValidator(_check_clean)] = Field(
        default=None,
        description="unlisted: remove the runs that no study lists, and half-written files of dead processes",
    )
    delete: Annotated[str | None, Place()] = Field(
        default=None,
        min_length=1,
        description="a study's name: remove it and the runs that no other study lists; or a run's id: remove that run",
    )
    yes: bool = Field(default=False, description="remove without asking (clean, delete)")
    upgrade: bool = Field(default=False, description="rewrite the pool's files of older versions, once")

    @model_validator(mode="after")
    def _check_task(self) -> StatusSpec:
        if self.watch is not None and self.name is None:
            raise ValueError("watch needs a study; add name=…")
        if self.clean is not None and self.name is not None:
            raise ValueError("clean=unlisted reads every study of the pool; leave name out")
        if self.delete is not None and (self.name is not None or self.clean is not None):
            raise ValueError(f"delete={self.delete} does not go together with name or clean; leave these out")
        if self.upgrade and any(given is not None for given in (self.name, self.clean, self.delete, self.watch)):
            raise ValueError("upgrade rewrites every study of the pool; leave name, watch, clean and delete out")
        if self.yes and self.clean is None and self.delete is None:
            raise ValueError(
                "yes=true needs clean=unlisted or delete=…, whose question it answers; add one, or leave yes out"
            )
        return self


class DescribeSpec(Settings):
    """The settings of `stability.describe`: every key of every command, for people and programs."""

    command: str | None = Field(default=None, description="the command; null: all of them")
    format: Literal["text", "json"] = Field(default="text", description="text, a line for each key; or json")


LOOPBACK = ("127.0.0.1", "localhost")


class WebSpec(Settings):
    """The settings of `stability.web`: the page that composes commands, starts sweeps and follows runs."""

    runs_dir: Annotated[str, Place()] = Field(default="runs", min_length=1, description="folder of the pool of runs")
    reports_dir: Annotated[str, Place()] = Field(default="reports", min_length=1, description="folder of the PDFs")
    port: int = Field(default=0, ge=0, le=65535, description="port of the page; 0: a free one")
    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on; another one needs token")
    token: str | None = Field(
        default=None,
        min_length=16,
        pattern=r"^[A-Za-z0-9_-]+$",
        description="secret of the page's address; null: a new one for one use",
    )
    open: bool = Field(default=False, description="whether the page is opened in the browser")

    @model_validator(mode="after")
    def _check_host(self) -> WebSpec:
        if self.host not in LOOPBACK and self.token is None:
            raise ValueError(
                f"host={self.host}: others on the network can reach the page there; add token=… of at least 16 letters "
                "and digits, or leave host out"
            )
        return self


class ProbeSpec(Settings):
    """The settings of `stability.probe`: measurements of trained layers, their graphs and PDMM networks."""

    what: Literal[
        "spectra",
        "qk",
        "pdmm",
        "streams",
        "training_free",
        "mirror",
        "train_nll",
        "lengths",
        "quantization",
        "connectivity",
        "coordinates",
    ] = Field(
        description="graph and softmax spectra, σ(W_qᵀW_k), attention's consensus discrepancy and PDMM's, mixing of "
        "residual streams, sa replaced without training, the NLL of a text read backwards, of training windows, of "
        "texts longer than in training and with rounded weights, the plain graphs' λ_1, or a parametrization's "
        "coordinate check"
    )
    ckpt: Annotated[str | None, Place()] = Field(
        default=None, min_length=1, description="a checkpoint folder, a run's folder or a study's folder"
    )
    plugins: tuple[str, ...] = Field(default=(), description="modules of your own that the runs were trained with")
    phase: Literal["terminal", "earliest", "last", "before_decay", "all"] = Field(
        default="terminal",
        description="which checkpoints of a run are measured: of its last planned step, the first, the last before a "
        "divergence, the last before schedule=wsd decays (all: the first three)",
    )
    sequences: int = Field(
        default=2,
        ge=1,
        description="held-out sequences that the layers are measured on (spectra, pdmm, streams, training_free, "
        "quantization)",
    )
    lengths: tuple[Annotated[int, Field(ge=2, le=64)], ...] = Field(
        default=(2, 4), min_length=1, description="lengths of a text, in multiples of the trained one (lengths)"
    )
    bits: tuple[Annotated[int, Field(ge=2, le=8)], ...] = Field(
        default=(8, 6, 4, 3, 2), min_length=1, description="bits of a rounded weight, 2 to 8 (quantization)"
    )
    groups: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(0, 64), min_length=1, description="inputs of a row with one scale; 0: the whole row (quantization)"
    )
    mechanism: Annotated[tuple[Part, ...], some_parts("mechanisms")] = Field(
        default=(), description="mechanisms that replace sa: sparge, fasa, with settings of their own (training_free)"
    )
    budgets: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        default=(0.1, 0.25, 0.5, 0.75, 0.9, 1.0),
        min_length=1,
        description="shares that may be kept: sparge's τ, fasa's keys over positions; 1: all (training_free)",
    )
    calibration: int = Field(
        default=8, ge=1, description="training sequences for choosing fasa's frequency chunks (training_free)"
    )
    outlier_log_range: float = Field(
        default=30.0,
        gt=0,
        description=(
            "ln(1/ν) above which an input of Sinkhorn's iterations counts as an outlier; ν: its relative "
            "range (streams)"
        ),
    )
    probes: int = Field(
        default=4, ge=2, description="random vectors of a spectral density (spectra); their scatter is its error bar"
    )
    products: int = Field(default=32, ge=1, description="products with L̄ for each of them (spectra)")
    seed: int = Field(
        default=0,
        ge=0,
        description="seed of the random vectors (spectra), or of the networks and the order of updates (pdmm)",
    )
    nodes: int = Field(default=8, ge=3, le=1024, description="nodes of each network (pdmm)")
    constraints: Literal["consensus", "general"] = Field(
        default="consensus", description="x_i = x_j on every edge, or random A_ij, A_ji and b_ij (pdmm)"
    )
    rho: float = Field(default=1.0, gt=0, description="weight ρ of PDMM's quadratic penalty (pdmm)")
    averaging: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of the new message in each message sent: 1 is PDMM, 0.5 is ADMM (pdmm)",
    )
    iterations: int = Field(
        default=200, ge=2, description="iterations; an asynchronous one is as many updates as there are nodes (pdmm)"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="device of the model; eigenvalues of graphs are computed on the CPU"
    )
    reports_dir: Annotated[str, Place()] = Field(
        default="reports",
        min_length=1,
        description="folder of the figure if no ckpt is given (connectivity, pdmm, coordinates)",
    )

    @model_validator(mode="after")
    def _check_stand_ins(self) -> ProbeSpec:
        """Refuse a missing or trainable mechanism, and a mechanism for another probe than training_free."""
        registry = Registry("mechanisms")
        choices = registry.names(cross=False, trainable=False)
        if self.what != "training_free" and self.mechanism:
            raise ValueError(f"mechanism=… belongs to what=training_free, which takes {' and '.join(choices)}")
        if self.what == "training_free" and not self.mechanism:
            raise ValueError(f"what=training_free needs a mechanism that replaces sa: mechanism=[{','.join(choices)}]")
        for part in self.mechanism:
            if registry.load(part.name).trainable:
                raise ValueError(
                    f"mechanism={part.name} needs training; what=training_free takes {' and '.join(choices)}"
                )
        return self

    @model_validator(mode="after")
    def _check_ckpt(self) -> ProbeSpec:
        if self.what not in ("connectivity", "pdmm", "coordinates") and self.ckpt is None:
            raise ValueError(
                f"what={self.what} needs ckpt=FOLDER: a study, a run or a checkpoint; e.g. ckpt=runs/studies/quickstart"
            )
        return self


class DashboardSpec(Settings):
    """The settings of `stability.dashboard`: a study's runs, its tables and figures, and a workspace on W&B."""

    name: Annotated[str, Place()] = Field(
        min_length=1, description="a study's name under runs_dir/studies, or its folder"
    )
    send: Literal["missing", "all", "none"] = Field(
        default="missing",
        description="runs that are sent from their own files: those missing or incomplete on W&B, all, or none",
    )
    project: str = Field(default=PROJECT, min_length=1, description="project that they go to")
    entity: str | None = Field(
        default=None, min_length=1, description="user or team that it belongs to; null: the account's default"
    )
    runs_dir: Annotated[str, Place()] = Field(default="runs", min_length=1, description="folder of the pool of runs")
    reports_dir: Annotated[str, Place()] = Field(
        default="reports", min_length=1, description="folder of the PDF that is sent, made where it is not up to date"
    )
