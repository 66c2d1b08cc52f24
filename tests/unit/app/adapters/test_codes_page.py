"""docs/validation.md says what the code does."""

import re
from pathlib import Path

from app.adapters import check_process, probes
from app.adapters.codes_page import page
from app.adapters.outcome import BEHAVIOUR_CODES, PROCESS_CODES

ROOT = Path(__file__).resolve().parents[4]


def test_the_page_is_the_one_that_the_code_writes() -> None:
    assert (ROOT / "docs/validation.md").read_text() == page()


def test_every_code_of_the_probes_and_of_the_check_process_is_explained() -> None:
    raised = re.findall(r'"(behaviour_\w+|non_finite_\w+)"', Path(probes.__file__).read_text())
    assert set(raised) == set(BEHAVIOUR_CODES)
    raised = re.findall(r'"(check_\w+|resource_\w+)",', Path(check_process.__file__).read_text())
    assert set(raised) == set(PROCESS_CODES)
