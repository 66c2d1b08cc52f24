"""`python -m benchmarks.step_profile`: every case is a step whose parts are told apart."""

from pathlib import Path

import pytest

from benchmarks.step_profile import CASES, main
from tests.model_factories import make_llama, save_folder


def test_every_case_is_a_step_whose_parts_are_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_folder(
        make_llama(num_hidden_layers=1, max_position_embeddings=512), tmp_path / "base"
    )
    main(["--base", str(base), "--threads", "1", "--rounds", "1"])
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head.split("|")[2].strip() == "step"
    assert [line.split("|")[1].strip() for line in lines] == [case.title for case in CASES]
    for line in lines:
        step, _, layers, logits, draws, rest = map(float, line.split("|")[2:-1])
        assert layers > 0.0
        assert abs(layers + logits + draws + rest - step) < 0.3
        assert rest > -0.3  # rounding alone
