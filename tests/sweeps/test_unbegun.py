"""Whether a launch that was refused had begun, and so leaves the study as it is."""

import json

import pytest

from stability.runs.study import StudyFolder
from sweeps.shared import put_back_unless_begun
from tests.sweeps import fakes


@pytest.mark.parametrize(
    ("written", "is_begun"),
    [
        ("local.json", True),
        ("slurm.json", True),
        ("17_end.json", False),  # of a job of an earlier launch, which ends meanwhile
        ("experiment_state.json", False),
    ],
)
def test_a_launch_has_begun_once_jobs_are_queued_and_not_when_others_end(tmp_path, written, is_begun):
    study, own = StudyFolder.of(tmp_path, "study"), tmp_path / "studies" / "study" / "slurm"
    study.write([])
    own.mkdir()
    before, trial = study.file.read_bytes(), fakes.make_trial(tmp_path)
    with pytest.raises(RuntimeError, match="refused"), put_back_unless_begun(study, [trial], own):
        study.write([trial.run_id])
        (own / written).write_text(json.dumps({"end": "ended"}))
        raise RuntimeError("refused")
    assert (study.file.read_bytes() == before) is not is_begun
