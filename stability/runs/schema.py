"""Define the columns of every parquet file of a study: `stability.runs.results` writes them, `analysis.study.load`
reads.

This module imports nothing, so that `analysis` may import it and stay free of the rest of `stability`. Whoever adds a
column here fills it where its rows are made. Until a file from before is written again it lacks it, and the reader says
so.
"""

SCHEMA_VERSION = 1  # kept in every file; a reader refuses another one

# A row a run.
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
    # what one objective validates beside its NLL, the parts that another's is a sum of, and what frequencies reach:
    # every file has these, whatever its objective, since there were no others at first (`OWN_PREFIXES`)
    "val_accuracy",
    "val_nll_sequence",
    "val_nll_structure",
    "unigram_nll_sequence",
    "unigram_nll_structure",
    "gen_nll",
    "gen_nll_sequence",  # its parts, likewise
    "gen_nll_structure",
    "gen_oracle",
    "num_steps",
    "num_tokens",
    "wall_s",
    "skipped_steps",
    "restores",
    "undefined_states",  # optimizer states asked for in which the run's optimizer has no α_max
    "planned_steps",  # that the run was to take; num_steps is how far it came
    "last_checkpoint_step",  # missing where it left none
    "optimizer_state_bytes",
    "step_s",  # median seconds of a training step
    "state_bytes",  # that the mixers keep of one sequence to go on reading; missing where there is no going on
    "settings",  # of the mechanism (and of its cross mechanism) that are not the defaults, e.g. "rope=absolute"
    "reading",  # of its paper's formula, which the mechanism computes, and why; "" if there is one alone
    "blind_to_order",  # 1 if the mechanism cannot distinguish a text from its mirror image, else 0
]
# A row a training step, as logged.
CURVES_COLUMNS = ["run_id", "step", "loss", "grad_norm", "update_norm", "lr", "val_nll"]
# A row a training step and block of parameters, of a run with `log.gradients=…`.
GRADIENT_COLUMNS = ["run_id", "step", "block", "grad_norm", "grad_share", "update_ratio"]

CHECKPOINT_STEP = "checkpoint_step"  # of the run: where the measured checkpoint stands
PROTOCOL = "protocol"  # how it was measured, as JSON, the run's own values in place of nulls
# A row a recorded step, as `stability.hessian` leaves it in a run's folder.
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
    "gradient",  # whose slope entered α_max: "true" (the loss's own) or "clipped"
    "difference_curvature",  # what the central difference behind rel_error gave
    "float64_curvature",  # the curvature once more in float64, where the two did not agree
    CHECKPOINT_STEP,
    "rms_u",  # root mean square of the entries of u = (θ⁺ − θ)/lr
]
COLLECTED_CURVATURE_COLUMNS = [*CURVATURE_COLUMNS, PROTOCOL]
# What `stability.hessian measure=…` adds beside <phase>.parquet, as <phase>_<name>.parquet, where a run has it.
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
# What `stability.probe` leaves in a run's folder as probes/<phase>_<name>.parquet; collected where a run has it.
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
    # A row a checkpoint, of all its run's held-out sequences.
    "mirror": ["run_id", "phase", "lr", "sequences", "nll", "mirrored_nll", "difference"],
    # A row a stand-in for `sa` (``mixer``, and ``label``: its settings), budget and held-out sequence; and layer.
    "training_free": [
        "run_id", "phase", "lr", "mixer", "label", "budget", "sequence", "counted", "nll", "sa_nll", "skipped",
    ],
    "training_free_layers": [
        "run_id", "phase", "lr", "layer", "mixer", "label", "budget", "sequence", "error", "skipped",
    ],
}  # fmt: skip
# Of graphs that depend on no run: `stability.probe` writes them among a study's results, which `collect` leaves alone.
GRAPH_COLUMNS = {
    "connectivity": ["graph", "positions", "window", "connectivity", "bound_low", "bound_high"],
    "pdmm": [
        "graph", "schedule", "constraints", "rho", "averaging", "nodes", "edges", "iteration", "error", "discrepancy",
    ],
}  # fmt: skip
# What `stability.generate` leaves in a run's folder as generation/<phase>.parquet, a row a sample: `nll` in nats per
# scored token of the oracle's own.
GENERATION_COLUMNS = [
    "run_id", "phase", "sample", "nll", "nll_per_byte", "num_tokens", "num_bytes", "oracle", "oracle_sha256", "sampler",
    "steps", "temperature", "seed",
]  # fmt: skip
# What every study's table of them has beside, since one kind of samples had it at first: parts of `nll`, whether
# contexts were given, and how many drawn masks each score is a mean over.
COLLECTED_GENERATION_COLUMNS = [*GENERATION_COLUMNS, "nll_sequence", "nll_structure", "contexts", "oracle_draws"]
# The first sample of each run's terminal checkpoint, scored or not.
SAMPLES_COLUMNS = [
    "run_id", "phase", "sample", "text", "num_characters", "nll", "oracle", "sampler", "temperature", "reason",
]  # fmt: skip
# What a sweep that chooses its runs by itself found (`lr=edge`, `search=optuna`).
SEARCH_COLUMNS = {
    # A row a curve, found by one of its runs. `best_low`, `best_high`: the best rate's neighbours; `*_next_lr`: the
    # smallest rate beyond an edge.
    "edges": [
        "run_id", "num_seeds", "best_lr", "best_nll", "best_low", "best_high", "verdict_lr", "verdict_next_lr",
        "verdict_exceptions", "nll_lr", "nll_next_lr", "nll_exceptions", "lowest_lr", "highest_lr",
        "resolution_decades", "nll_tolerance", "num_rates", "num_runs", "num_grid_runs", "num_rounds", "state",
    ],
    # A row a run and field: what it was in the point that it belongs to; `score`: the point's, None where a run failed
    # or has not ended.
    "search": ["run_id", "number", "round", "score", "field", "value"],
    # A row a member of a population and segment, which is a run of its own; `parent`: the run whose checkpoint it went
    # on from, `took_over`: another member's; `score`: the validation NLL at its end, None where it diverged.
    "lineage": [
        "run_id", "population", "member", "segment", "first_step", "last_step", "lr", "parent", "took_over", "score",
    ],
}  # fmt: skip

# The tables that every study has, and, by the field of `analysis.study.load.Study` that holds them, those that only
# some have.
REQUIRED = {"runs": RUNS_COLUMNS, "curvature": COLLECTED_CURVATURE_COLUMNS, "curves": CURVES_COLUMNS}
OPTIONAL = {
    "spectra": SPECTRA_COLUMNS,
    "probes": {**PROBE_COLUMNS, **GRAPH_COLUMNS},
    "generation": {"generation": COLLECTED_GENERATION_COLUMNS, "samples": SAMPLES_COLUMNS},
    "searches": SEARCH_COLUMNS,
    "gradients": {"gradients": GRADIENT_COLUMNS},
}

# By the table's name: columns that files lack which are older than they; a reader takes them for empty.
YOUNGER = {
    "runs": ("optimizer_state_bytes", "step_s", "state_bytes", "settings", "reading", "blind_to_order"),
    "curvature": ("rms_u",),
}

# By the table's name: how the columns begin that an objective adds under names of its own, all of them numbers. What it
# validates beside the NLL, the parts that this is a sum of, what frequencies reach of each, parts of an oracle's NLL.
# Of recorded steps what only some optimizers have: `rate_found`, the rate that one found by itself, the run's in it.
OWN_PREFIXES = {"runs": ("val_", "unigram_nll_", "gen_nll_"), "generation": ("nll_",), "curvature": ("rate_",)}


def own_columns(table: str, names: list[str]) -> list[str]:
    """Return those of ``names``, each once and in their order, that an objective or an optimizer has added to a table's
    columns."""
    known = {**REQUIRED, **OPTIONAL["generation"]}.get(table, ())
    own = (name for name in names if name.startswith(OWN_PREFIXES.get(table, ())) and name not in known)
    return list(dict.fromkeys(own))


# Types, by the column's name in whatever table: text, and whole numbers in a log; every other column holds numbers.
TEXT = frozenset({
    "study", "run_id", "mechanism", "variant", "residual", "norm", "cross", "optimizer", "objective", "data",
    "data_fingerprint", "model", "status", "reason", "phase", "state", "method", "note", "protocol", "block", "mixer",
    "graph", "gen_oracle", "oracle", "oracle_sha256", "sampler", "field", "schedule", "constraints", "branch", "matrix",
    "quantity", "verdict_exceptions", "nll_exceptions", "contexts", "gradient", "undefined_states", "text",
    "parent", "label", "settings", "reading",
})  # fmt: skip
WHOLE = frozenset({"step"})
