"""Columns of every parquet file of a study.

`stability.runs.results` writes them, `analysis.study.load` reads them. This module imports nothing, so that `analysis`
may import it without the rest of `stability`. A new column must also be filled by the code of its rows. An older file
lacks it until rewritten, and the reader says so.
"""

SCHEMA_VERSION = 1  # stored in every file; a reader refuses another one

# One row per run.
RUNS_COLUMNS = [
    "study",
    "run_id",
    "mechanism",
    "variant",
    "residual",
    "norm",
    "cross",
    "optimizer",
    "objective",
    "data",
    "data_fingerprint",
    "model",
    "num_params",
    "lr",
    "seed",
    "status",
    "reason",
    "val_nll",
    "init_nll",
    "unigram_nll",
    # further scores and loss components of two objectives, and the baselines of the components: every file has these
    # columns, since no others existed at first (`OWN_PREFIXES`)
    "val_accuracy",
    "val_nll_sequence",
    "val_nll_structure",
    "unigram_nll_sequence",
    "unigram_nll_structure",
    "gen_nll",
    "gen_nll_sequence",  # its components, likewise
    "gen_nll_structure",
    "gen_oracle",
    "num_steps",
    "num_tokens",
    "wall_s",
    "skipped_steps",
    "restores",
    "undefined_states",  # requested optimizer states without an α_max for the run's optimizer
    "planned_steps",  # num_steps is the number of steps taken
    "last_checkpoint_step",  # missing without a checkpoint
    "optimizer_state_bytes",
    "step_s",  # median seconds of a training step
    "state_bytes",  # recurrent state or cache of the mixers per sequence; missing if not causal
    "settings",  # non-default ones of the mechanism and its cross mechanism, e.g. "rope=absolute"
    "reading",  # reading of its paper's formula that the mechanism computes; "" without a choice
    "blind_to_order",  # 1 if the mechanism hardly or never distinguishes a text from its mirror image, else 0
]
# One row per training step, as logged.
CURVES_COLUMNS = ["run_id", "step", "loss", "grad_norm", "update_norm", "lr", "val_nll"]
# One row per training step and block of parameters, of a run with `log.gradients=…`.
GRADIENT_COLUMNS = ["run_id", "step", "block", "grad_norm", "grad_share", "update_ratio"]
# Rows of a run with `log.activations=…`, at each logged step: a layer's ("blocks.0") fills `stream_rms` to
# `router_entropy`, the model's ("model") `logit_rms` to `clipped_share`, a block of parameters' ("blocks.0.mixer")
# `rms_t` and `tiny_share`. A number without a column here is not collected.
ACTIVATION_COLUMNS = [
    "run_id", "step", "block", "stream_rms", "mixer_rms", "ffn_rms", "attention_logit_max", "attention_entropy_min",
    "dead_share", "saturated_share", "expert_load_max", "dead_experts", "router_entropy", "logit_rms", "logit_max",
    "log_z", "clipped_share", "rms_t", "tiny_share",
]  # fmt: skip
# One row per step of a run with `log.curvature=…`.
EDGE_COLUMNS = [
    "run_id", "step", "slope", "curvature", "alpha_max", "alpha", "adam_sharpness", "adam_residual", "adam_threshold",
    "adam_ratio", "products",
]  # fmt: skip
# Logs of `RunDirectory.signal_files` by name.
SIGNAL_COLUMNS = {"gradients": GRADIENT_COLUMNS, "activations": ACTIVATION_COLUMNS, "edge": EDGE_COLUMNS}

CHECKPOINT_STEP = "checkpoint_step"  # step of the measured checkpoint
PROTOCOL = "protocol"  # the measurement's settings as JSON, with the run's own values instead of nulls
# One row per recorded step, as `stability.hessian` writes it to a run's folder.
CURVATURE_COLUMNS = [
    "run_id",
    "phase",
    "state",
    "step",
    "slope",
    "curvature",
    "alpha_max",
    "lr",
    "loss_before",
    "loss_after",
    "method",
    "rel_error",
    "critical_lr",
    "parity_curvature",
    "parity_alpha_max",
    "note",
    "gradient",  # gradient of the slope in α_max: "true" (the loss's own) or "clipped"
    "difference_curvature",  # curvature by central difference, for rel_error
    "float64_curvature",  # curvature recomputed in float64 if the two disagreed
    CHECKPOINT_STEP,
    "rms_u",  # root mean square of the entries of u = (θ⁺ − θ)/lr
]
COLLECTED_CURVATURE_COLUMNS = [*CURVATURE_COLUMNS, PROTOCOL]
# Optional files <phase>_<name>.parquet of `stability.hessian measure=…`, beside <phase>.parquet.
SPECTRA_COLUMNS = {
    "profile": [
        "run_id", "phase", "state", "lr", "alpha", "loss", "loss_before", "slope", "curvature", "alpha_max",
        "critical_lr",
    ],
    "sharpness": [
        "run_id", "phase", "state", "lr", "loss", "sharpness", "sharpness_residual", "adam_sharpness", "adam_residual",
        "adam_threshold", "adam_ratio", "trace", "trace_error", "gauss_newton_share", "noise_scale",
        "attention_logit_max", "attention_entropy",
    ],
    "density": ["run_id", "phase", "state", "lr", "probe", "node", "weight", "num_params"],
    "blocks": ["run_id", "phase", "state", "lr", "block", "share", "own", "curvature"],
}  # fmt: skip
SPECTRA = tuple(SPECTRA_COLUMNS)
# Optional files probes/<phase>_<name>.parquet of `stability.probe` in a run's folder.
_LAYER_COLUMNS = ["run_id", "phase", "lr", "layer", "mixer", "head"]
PROBE_COLUMNS = {
    "spectra": [
        *_LAYER_COLUMNS, "sequence", "num_positions", "head_width", "components", "step_size", "step_limit", "largest",
        "fiedler", "fiedler_low", "fiedler_high", "graph_fiedler", "non_oscillating", "gain", "second_eigenvalue",
        "energy_before", "energy_after", "variance_before", "variance_after",
    ],
    "filter": [*_LAYER_COLUMNS, "sequence", "probe", "node", "weight", "response"],
    "qk": [*_LAYER_COLUMNS, "index", "singular_value"],
    "discrepancy": [
        *_LAYER_COLUMNS, "sequence", "num_positions", "gamma", "diagonal", "value_rms", "own_rms", "unscaled_rms",
    ],
    "streams": [
        "run_id", "phase", "lr", "connection", "branch", "matrix", "quantity", "quantile", "value", "num_values",
    ],
    # One row per checkpoint, over all held-out sequences of its run.
    "mirror": ["run_id", "phase", "lr", "sequences", "nll", "mirrored_nll", "difference"],
    # One row per checkpoint: `train_nll` on `sequences` windows of the training side, `nll` on the held-out examples.
    "train_nll": ["run_id", "phase", "lr", "sequences", "train_nll", "nll", "difference"],
    # One row per length, `multiple` of the trained one; `limit`: the most positions that the model reads, missing
    # without one; `nll`: in pieces of the trained length, `long_nll`: of the whole, missing beyond the limit.
    "lengths": ["run_id", "phase", "lr", "multiple", "limit", "sequences", "nll", "long_nll", "difference"],
    # One row per number of bits and group (0: a row has one scale); `share`: that the rounded weights are of the
    # parameters of mixers and feed-forward networks.
    "quantization": [
        "run_id", "phase", "lr", "bits", "group", "sequences", "share", "nll", "quantized_nll", "difference",
    ],
    "quantization_layers": [
        "run_id", "phase", "lr", "layer", "branch", "bits", "group", "error", "rms", "kurtosis",
    ],
    # One row per substitute of `sa` (``mixer``, and ``label``: its settings), budget and held-out sequence (and layer).
    "training_free": [
        "run_id", "phase", "lr", "mixer", "label", "budget", "sequence", "counted", "nll", "sa_nll", "skipped",
    ],
    "training_free_layers": [
        "run_id", "phase", "lr", "layer", "mixer", "label", "budget", "sequence", "error", "skipped",
    ],
}  # fmt: skip
# Numbers independent of runs: `stability.probe` writes them to a study's results; `collect` does not touch them.
GRAPH_COLUMNS = {
    "connectivity": ["graph", "positions", "window", "connectivity", "bound_low", "bound_high"],
    "pdmm": [
        "graph", "schedule", "constraints", "rho", "averaging", "nodes", "edges", "iteration", "error", "discrepancy",
    ],
    # One row per model (size, seed), step, quantity and measure. `field`: what grows, "width" or "layers"; `lr`,
    # `batch`, `positions`, `objective` and `data`: the training's.
    "coordinates": [
        "mechanism", "residual", "norm", "optimizer", "parametrization", "field", "size", "seed", "step", "quantity",
        "measure", "value", "lr", "batch", "positions", "objective", "data",
    ],
}  # fmt: skip
# Files generation/<phase>.parquet of `stability.generate` in a run's folder, one row per sample: `nll` in nats per
# scored token of the oracle.
GENERATION_COLUMNS = [
    "run_id", "phase", "sample", "nll", "nll_per_byte", "num_tokens", "num_bytes", "oracle", "oracle_sha256", "sampler",
    "steps", "temperature", "seed",
]  # fmt: skip
# Further columns of every study's table, first used by one kind of samples: components of `nll`, contexts given or
# not, and the number of drawn masks per score.
COLLECTED_GENERATION_COLUMNS = [*GENERATION_COLUMNS, "nll_sequence", "nll_structure", "contexts", "oracle_draws"]
# The first sample of each run's terminal checkpoint, scored or not.
SAMPLES_COLUMNS = [
    "run_id", "phase", "sample", "text", "num_characters", "nll", "oracle", "sampler", "temperature", "reason",
]  # fmt: skip
# Findings of a sweep that chooses its own runs (`lr=edge`, `search=optuna`).
SEARCH_COLUMNS = {
    # One row per curve, identified by one of its runs. `best_low`, `best_high`: neighbours of the best rate;
    # `*_next_lr`: the smallest rate beyond an edge.
    "edges": [
        "run_id", "num_seeds", "best_lr", "best_nll", "best_low", "best_high", "verdict_lr", "verdict_next_lr",
        "verdict_exceptions", "nll_lr", "nll_next_lr", "nll_exceptions", "lowest_lr", "highest_lr",
        "resolution_decades", "nll_tolerance", "num_rates", "num_runs", "num_grid_runs", "num_rounds", "state",
    ],
    # One row per run and field: the field's value in the run's point; `score`: the point's, None if a run failed or is
    # unfinished.
    "search": ["run_id", "number", "round", "score", "field", "value"],
    # One row per member of a population and segment, each a run of its own; `parent`: run of the initial checkpoint,
    # `took_over`: whether that is another member's; `score`: final validation NLL, None if diverged.
    "lineage": [
        "run_id", "population", "member", "segment", "first_step", "last_step", "lr", "parent", "took_over", "score",
    ],
}  # fmt: skip

# Tables of every study; then optional tables by their field of `analysis.study.load.Study`.
REQUIRED = {"runs": RUNS_COLUMNS, "curvature": COLLECTED_CURVATURE_COLUMNS, "curves": CURVES_COLUMNS}
OPTIONAL = {
    "spectra": SPECTRA_COLUMNS,
    "probes": {**PROBE_COLUMNS, **GRAPH_COLUMNS},
    "generation": {"generation": COLLECTED_GENERATION_COLUMNS, "samples": SAMPLES_COLUMNS},
    "searches": SEARCH_COLUMNS,
    "signals": SIGNAL_COLUMNS,
}

# By table: prefixes of an objective's own numeric columns: further validation scores, those at step 0, components of
# the NLL, their
# frequency baselines, components of an oracle's NLL. For recorded steps, columns of some optimizers: `rate_found`, the
# learning rate found by the optimizer itself, times the run's. For runs, columns of some parts: `idle_params`,
# parameters that a position does not meet; `piecewise_smooth`, 1 if the model selects by scores of its own.
OWN_PREFIXES = {
    "runs": ("val_", "init_val_", "unigram_nll_", "gen_nll_", "idle_", "piecewise_"),
    "generation": ("nll_",),
    "curvature": ("rate_",),
}


def own_columns(table: str, names: list[str]) -> list[str]:
    """Return the names added by an objective or an optimizer, in order, without repetition."""
    known = {**REQUIRED, **OPTIONAL["generation"]}.get(table, ())
    own = (name for name in names if name.startswith(OWN_PREFIXES.get(table, ())) and name not in known)
    return list(dict.fromkeys(own))


def own_settings(protocol: dict, spec: dict) -> dict:
    """Return the run's batch and clipping norm for a protocol of α_max that has null; the norm is ∞ without clipping.

    Args:
        protocol: fields as in `stability.config.curvature.CurvatureSpec`.
        spec: the run's or study's spec.
    """
    own = {key: spec[key] for key in ("batch", "clip_norm") if protocol.get(key) is None and key in spec}
    return own | {"clip_norm": float("inf")} if own.get("clip_norm", 0.0) is None else own


# Types by column name in any table: text, and integers in a log; every other column is numeric.
TEXT = frozenset({
    "study", "run_id", "mechanism", "variant", "residual", "norm", "cross", "optimizer", "objective", "data",
    "data_fingerprint", "model", "status", "reason", "phase", "state", "method", "note", "protocol", "block", "mixer",
    "graph", "gen_oracle", "oracle", "oracle_sha256", "sampler", "field", "schedule", "constraints", "branch", "matrix",
    "quantity", "verdict_exceptions", "nll_exceptions", "contexts", "gradient", "undefined_states", "text",
    "parent", "label", "settings", "reading", "parametrization", "measure",
})  # fmt: skip
WHOLE = frozenset({"step"})
