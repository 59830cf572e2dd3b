"""Settings of curvature measurements: the paper's protocol, with a field for each of its numbers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from stability.config.base import Settings


def _read_true_as_text(value: Any) -> Any:
    return "true" if value is True else value  # YAML reads gradient=true as a truth value


class SpectraSpec(Settings):
    """Resolution of the measurements beyond α_max requested by `measure`."""

    critical_resolution: float = Field(
        default=1e-2, gt=0, lt=1, description="relative width at which the search for the critical learning rate ends"
    )
    profile_points: int = Field(
        default=24,
        ge=2,
        description="intervals of the loss along u up to 1.3 times each mark (α_max, critical learning rate)",
    )
    eigenvalue_tolerance: float = Field(
        default=1e-2, gt=0, lt=1, description="relative residual at which Lanczos stops (sharpness)"
    )
    eigenvalue_products: int = Field(
        default=64, ge=2, description="most Hessian-vector products for one largest eigenvalue (sharpness)"
    )
    trace_products: int = Field(
        default=30, ge=6, description="Hessian-vector products of the trace, by Hutch++ (sharpness)"
    )
    noise_batches: int = Field(default=8, ge=1, description="batches for the gradient noise scale (sharpness)")
    noise_parts: int = Field(default=8, ge=2, description="microbatches of each of these batches (sharpness)")
    density_probes: int = Field(default=3, ge=1, description="random vectors of the spectral density")
    density_products: int = Field(default=24, ge=2, description="Hessian-vector products for each of these vectors")

    def select(self, names: tuple[str, ...]) -> SpectraSpec:
        """Return a copy with the named settings; all others have their defaults."""
        return SpectraSpec(**{name: getattr(self, name) for name in names})


class CurvatureSpec(Settings):
    """The protocol of the paper's section 5.2.1; every number of it is a field."""

    phase: Literal["terminal", "earliest", "last", "all"] = Field(
        default="terminal",
        description="which checkpoints of a run are measured: of its last planned step, the first, the last before a "
        "divergence",
    )
    state: tuple[Literal["paper", "checkpoint"], ...] = Field(
        default=("paper", "checkpoint"),
        min_length=1,
        description="optimizer state the steps start from: the paper's warm-up, or the run's own",
    )
    batch: int | None = Field(default=None, ge=1, description="sequences per measured step; null: the run's own batch")
    microbatch: int | None = Field(
        default=None, ge=1, description="sequences evaluated at a time, which bounds the memory; null: the whole batch"
    )
    gradient: Annotated[Literal["auto", "true", "clipped"], BeforeValidator(_read_true_as_text)] = Field(
        default="auto",
        description=(
            "gradient of α_max's slope: the loss's own, the clipped one, or (auto) clipped for state=paper, "
            "else the loss's own"
        ),
    )
    weight_decay: bool = Field(
        default=True, description="whether the step direction u holds the optimizer's weight decay"
    )
    clip_norm: float | None = Field(
        default=None, gt=0, description="largest gradient norm that reaches the optimizer; null: the run's own"
    )
    warmup_batches: int = Field(
        default=5, ge=1, description="batches whose clipped gradients give m and v (state=paper)"
    )
    warmup_steps: int = Field(default=5, ge=0, description="optimizer steps taken before recording")
    recorded_steps: int = Field(default=25, ge=1, description="optimizer steps recorded")
    parity_steps: int = Field(
        default=1,
        ge=0,
        description="recorded steps, from the first on, that the paper's central difference (ε = 1e-4 raw) measures as "
        "well; 0: none",
    )
    method: Literal["auto", "taylor", "double_backward", "finite_difference", "parity"] = Field(
        default="auto", description="how uᵀHu is computed"
    )
    precision: Literal["float32", "run"] = Field(
        default="float32", description="precision of the loss; run: as in the run's training"
    )
    seed: int = Field(default=0, ge=0, description="seed of the measured batches and masks; training never uses these")
    measure: tuple[Literal["alpha_max", "critical_lr", "profile", "sharpness", "density", "blocks"], ...] = Field(
        default=("alpha_max",),
        min_length=1,
        description="what is measured; critical_lr is a column of alpha_max's table, each other a table of its own",
    )
    spectra: SpectraSpec = Field(default=SpectraSpec(), description="how finely `measure` looks beyond α_max")

    def gradient_of(self, state: str) -> Literal["true", "clipped"]:
        """Return the kind of gradient in α_max's slope for an optimizer state.

        "auto" follows section 5.2.1 in state "paper" ("for all computations, we clip the gradient").
        """
        if self.gradient == "auto":
            return "clipped" if state == "paper" else "true"
        return self.gradient
