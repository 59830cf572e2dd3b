"""Which cross mechanism a run had is a column of its own, so that runs with and without one are never averaged."""

from __future__ import annotations

import json

from stability.runs.results import collect
from stability.runs.study import StudyFolder


def test_the_column_names_the_cross_mechanism_and_is_empty_without_one(lab):
    with_cross = lab.spec(objective={"name": "mlm", "context": 4}, cross={"name": "ca"})
    plain, old = lab.spec(), lab.spec(seed=1)
    for spec in (with_cross, plain, old):
        lab.directory(spec).write_spec(spec.model_dump(mode="json"))
    values = json.loads(lab.directory(old).spec_file.read_text())
    del values["cross"]  # as runs wrote it before there was the field
    lab.directory(old).spec_file.write_text(json.dumps(values))
    study = StudyFolder.of(lab.pool, "s")
    study.write([lab.directory(spec).run_id for spec in (with_cross, plain, old)])
    assert collect(study.path).runs["cross"].tolist() == ["ca", "", ""]
