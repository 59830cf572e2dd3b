"""What is claimed of a synthetic study's rivals."""

from pathlib import Path

from analysis.claims import rivals
from analysis.claims.claim import Claim
from analysis.numbers.windows import windows
from analysis.study.load import load


def claims_of(folder: Path) -> dict[str, Claim]:
    """Claims of a study by their subject, every series counted as trained."""
    study = load(folder)
    found = windows(study)
    return {claim.subject: claim for claim in rivals.claims(study, found, dict.fromkeys(found, ""))}
