"""Required fields of our JSON files, checked by `stability.runs.directory.read_json`.

Other fields may exist, from younger versions.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stability.runs.older import is_older_spec, is_older_study
from stability.runs.schema import RUNS_COLUMNS, TEXT

LARGEST = 2**63  # whole numbers of a table are below it
TABULATED = frozenset(RUNS_COLUMNS)

Whole = Annotated[int, Field(ge=0, lt=LARGEST)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Record(BaseModel):
    """An object of a JSON file, without conversion: a number in quotes is no number."""

    model_config = ConfigDict(strict=True)

    @classmethod
    def is_older(cls, values: dict[str, Any]) -> bool:
        """Return whether the file is of an older version (`stability.runs.older`)."""
        return False


class ResultFile(Record):
    """The result in a status: numbers or null in all table columns except text ones."""

    model_config = ConfigDict(strict=True, extra="allow")
    val_nll: float | None = None
    wall_s: float | None = None

    @model_validator(mode="after")
    def _fits_the_table(self) -> ResultFile:
        for name, value in (self.model_extra or {}).items():
            if type(value) is int and abs(value) >= LARGEST:
                raise ValueError(f"{name} is too large a number")
            is_number = value is None or isinstance(value, int | float)
            if name in TABULATED and not (isinstance(value, str | None) if name in TEXT else is_number):
                raise ValueError(f"{name} is no {'text' if name in TEXT else 'number'}")
        return self


class StatusFile(Record):
    """The fields of ``status.json``."""

    state: str
    step: Whole
    reason: str = ""
    num_steps: Whole = 0
    changed_at: Number = 0.0
    phase: str = ""
    by: str = ""
    result: ResultFile = Field(default_factory=ResultFile)


class Part(Record):
    """A part of a spec: its name; its settings are not checked."""

    name: str


class WeightsPart(Record):
    """The initial weights of a run."""

    sha256: str


class SpecFile(Record):
    """The fields of ``spec.json`` that identify a run."""

    mechanism: Part
    residual: Part
    optimizer: Part
    norm: Part
    lr_peak: Number
    seed: int
    steps: Whole

    @classmethod
    def is_older(cls, values: dict[str, Any]) -> bool:
        return is_older_spec(values)


class TabulatedSpec(SpecFile):
    """The fields of ``spec.json`` for a run's row in a table."""

    objective: Part
    data: Part
    model: Part
    data_fingerprint: str
    cross: Part | None = None
    ffn: Part | None = None
    position: Part | None = None
    linear: Part | None = None
    precision: str = ""
    weights: WeightsPart | None = None


class ManifestFile(Record):
    """The fields of a checkpoint's ``manifest.json``.

    ``vocab_size`` or ``format`` describe the training data.
    """

    step: Whole
    sha256: dict[str, str]
    spec: dict[str, Any]
    vocab_size: Annotated[int, Field(ge=1)] | None = None
    format: Any = None

    @model_validator(mode="after")
    def _knows_its_data(self) -> ManifestFile:
        if self.vocab_size is None and self.format is None:
            raise ValueError("neither vocab_size nor format is there")
        return self


class CurvaturePart(Record):
    """The fields of a study's curvature settings."""

    measure: list[str] = Field(default_factory=list)
    phase: str


class GeneratePart(Record):
    """The fields of a study's samples."""

    oracle: str | None


class StudySpec(Record):
    """The fields of a sweep's spec."""

    hessian: bool = False
    curvature: CurvaturePart | None = None
    generate: GeneratePart | None = None
    objective: Part | None = None
    data: Part | None = None
    mechanism: list[Any] = Field(default_factory=list)
    residual: list[Any] = Field(default_factory=list)
    optimizer: list[Any] = Field(default_factory=list)
    norm: list[Any] = Field(default_factory=list)

    @model_validator(mode="after")
    def _says_how_it_measures(self) -> StudySpec:
        if self.hessian and self.curvature is None:
            raise ValueError("hessian is asked for, and there is no curvature")
        return self


class SharePart(Record):
    """The words of a share (`stability.runs.words.ShareWords`)."""

    model_config = ConfigDict(strict=True, extra="forbid")
    column: str
    name: str
    of: str


class AblationValue(Record):
    """A value of an ablated setting, and the name of its variant."""

    value: Any
    variant: str


class AblationPart(Record):
    """An ablated setting."""

    part: str
    setting: str
    values: list[AblationValue]


class WordsPart(Record):
    """The words of a study (`stability.runs.words.Words`): texts, except for these fields."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, str]
    position: list[str] = Field(default=["", ""], min_length=2, max_length=2)
    is_text: bool = True
    share: SharePart | None = None


class EarlierPart(Record):
    """Runs that an earlier command of the same study requested (`sweeps.earlier`)."""

    command: str
    reported: bool
    run_ids: list[str]


class TrainedBy(Record):
    """The number of a study's runs that one commit trained on one processor."""

    commit: str | None
    dirty: bool
    cpu: str | None
    runs: Whole


class DeclaredPart(Record):
    """Runs that had ended when a study's primary claim was declared, or when they joined it; the declaration's time."""

    ended: Whole
    runs: Whole
    at: str = ""


class StudyFile(Record):
    """The fields of ``study.json``."""

    run_ids: list[str]
    spec: StudySpec = Field(default_factory=StudySpec)
    provenance: dict[str, Any] = Field(default_factory=dict)
    variants: dict[str, str] = Field(default_factory=dict)
    stopped: dict[str, str] = Field(default_factory=dict)
    rungs: list[Whole] = Field(default_factory=list)
    ablations: list[AblationPart] | None = None
    earlier: list[EarlierPart] = Field(default_factory=list)
    trained_by: list[TrainedBy] = Field(default_factory=list)
    declared: DeclaredPart | None = None
    words: WordsPart | None = None

    @classmethod
    def is_older(cls, values: dict[str, Any]) -> bool:
        return is_older_study(values)


class PublishedFile(Record):
    """The fields of ``published.json``."""

    inputs: str
    outputs: str
    summary: str


class TimesFile(Record):
    """The fields of measured times, ``cache/timings/<digest>.json``."""

    step_s: float
    validation_s: float
    memory_mb: float
    measured_at: float


class SamplesFile(Record):
    """The required fields of ``samples/<phase>.json``: the file of samples, its hash, and the other files beside it."""

    file: Annotated[str, Field(pattern=r"^[^/\x00]+$")]
    file_sha256: str | None = None
    beside: dict[Annotated[str, Field(pattern=r"^[^/\x00]+$")], str] = Field(default_factory=dict)
