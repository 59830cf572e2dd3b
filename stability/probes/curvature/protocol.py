"""Describe a curvature measurement's protocol, and find its results on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stability.config.base import validate
from stability.config.curvature import CurvatureSpec, SpectraSpec
from stability.probes.stored import Stored
from stability.runs.parquet import has_columns, read_metadata, read_table, write_parquet
from stability.runs.run_files import OPTIMIZER, UNDEFINED
from stability.runs.schema import CURVATURE_COLUMNS, PROTOCOL, own_columns

PARITY = "parity_steps"
BEFORE = {"gradient": "true"}  # behaviour before the field existed, if not the default


def protocol_of(curvature: CurvatureSpec, reads: Sequence[str] = ()) -> str:
    """Return a table's protocol as canonical JSON.

    ``reads`` lists the table's settings of `SpectraSpec` besides the critical rate's.
    """
    critical = "critical_lr" in curvature.measure
    spectra = curvature.spectra.select((*(("critical_resolution",) if critical else ()), *reads))
    measured = ["alpha_max", "critical_lr"] if critical else ["alpha_max"]
    values = curvature.model_dump(mode="json", exclude={"phase", PARITY, "spectra"})
    gradients = {curvature.gradient_of(state) for state in curvature.state}
    values["gradient"] = gradients.pop() if len(gradients) == 1 else curvature.gradient
    return json.dumps({**values, "measure": measured, "spectra": spectra.model_dump(mode="json")}, sort_keys=True)


def full_protocol(curvature: CurvatureSpec) -> str:
    """Return `protocol_of` with every setting of `SpectraSpec`, for comparison with a file's."""
    return protocol_of(curvature, tuple(SpectraSpec.model_fields))


def spec_of(protocol: str) -> CurvatureSpec | None:
    """Return the settings behind a file's numbers, or None if obsolete.

    Obsolete: an unknown field or value. A field newer than the file gets its earlier behaviour: `BEFORE`, or the
    default.
    """
    try:
        return validate(CurvatureSpec, BEFORE | json.loads(protocol))
    except (ValueError, TypeError, RecursionError):  # or the file is damaged
        return None


class StoredSteps(Stored):
    """The recorded steps of a phase, grouped by optimizer state."""

    def __init__(self, path: Path, curvature: CurvatureSpec):
        stored = {**json.loads(protocol_of(curvature)), PARITY: curvature.parity_steps}
        super().__init__(path, json.dumps(stored, sort_keys=True))
        self.curvature = curvature

    def states(self) -> tuple[str, ...]:
        """Return the file's optimizer states measured under this protocol.

        States are compared by their effective settings: gradient=auto equals gradient=true in state "checkpoint" and
        gradient=clipped in state "paper". An additional critical learning rate is accepted, and so are additional steps
        by the paper's difference.
        """
        found, curvature = self.read_protocol(), self.curvature
        stored = None if found is None else spec_of(found)
        if found is None or stored is None:
            return ()
        # a file older than `parity_steps` passes without them
        if json.loads(found).get(PARITY, curvature.parity_steps) < curvature.parity_steps:
            return ()
        # files without the column are from a time with incomplete removal of decay
        if not curvature.weight_decay and not has_columns(self.path, ["gradient"]):
            return ()
        return tuple(
            state for state in stored.state if full_protocol(_alone(stored, state)) in self._list_accepted(state)
        )

    def _list_accepted(self, state: str) -> set[str]:
        alone = _alone(self.curvature, state)
        return {protocol_of(alone), protocol_of(alone.model_copy(update={"measure": ("alpha_max", "critical_lr")}))}

    def list_missing(self) -> tuple[str, ...]:
        """Return the requested states missing on disk."""
        stored = self.states()
        return tuple(state for state in self.curvature.state if state not in stored)

    def is_current(self) -> bool:
        return not self.list_missing()

    def write(
        self,
        rows: Sequence[dict[str, Any]],
        columns: Sequence[str] = CURVATURE_COLUMNS,
        undefined: Sequence[str] = (),
        optimizer: Mapping[str, Any] | None = None,
    ) -> None:
        """Replace the file; retain its rows of other states under the same protocol.

        Args:
            rows: the recorded steps.
            columns: of the table, besides the rows' own.
            undefined: states without an α_max.
            optimizer: properties of its step (`OPTIMIZER`), if any.
        """
        curvature = self.curvature
        others = [state for state in self.states() if state not in curvature.state]
        columns = [*columns, *own_columns("curvature", [name for row in rows for name in row])]
        table = pd.DataFrame(rows, columns=columns)
        if others:
            kept = read_table(self.path).to_pandas().query("state in @others").reindex(columns=list(columns))
            # a file may be older than the column
            kept["gradient"] = [curvature.gradient_of(state) for state in kept["state"]]
            table = pd.concat([kept, table], ignore_index=True) if rows else kept
            told = json.loads(read_metadata(self.path).get(UNDEFINED, "[]"))
            undefined = [*undefined, *(state for state in told if state in others)]
        whole = StoredSteps(self.path, curvature.model_copy(update={"state": (*others, *curvature.state)}))
        known = {PROTOCOL: whole.protocol, UNDEFINED: json.dumps(list(undefined))}
        known |= {OPTIMIZER: json.dumps(dict(optimizer), sort_keys=True)} if optimizer else {}
        write_parquet(table, self.path, known)


def _alone(curvature: CurvatureSpec, state: str) -> CurvatureSpec:
    return curvature.model_copy(update={"state": (state,)})
