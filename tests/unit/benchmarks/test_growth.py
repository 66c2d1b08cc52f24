"""`python -m benchmarks.growth` on a model of a few kilobytes."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import growth
from tests.model_factories import make_llama, save_folder

SIZE = growth.Size(2, 6, 2, (2, 5), (1, 2), (4, 8), (1, 3), (16, 64))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_llama(max_position_embeddings=512)
    return save_folder(model, tmp_path_factory.mktemp("base"))


def test_every_axis_has_its_points_and_ratios_to_the_first(base: Path) -> None:
    figures = list(growth.measure_steps(SIZE, base, 1, growth.AXES, arena_bytes=8 << 20))
    rows = growth.with_ratios(figures)
    assert [(row["axis"], row["point"]) for row in rows] == [
        ("adapters", 1), ("adapters", 2), ("rank", 4), ("rank", 8),
        ("batch", 1), ("batch", 3), ("context", 16), ("context", 64),
    ]  # fmt: skip
    assert [row["ratio"] for row in rows[::2]] == [1.0] * 4
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert len(growth.table(rows).splitlines()) == 9


def test_an_engine_serves_the_registered_adapters(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = f"file://{tmp_path / 'store'}"
    refs = growth.fill_store(store, base, tmp_path, 5)
    assert len({ref.digest for ref in refs}) == 5
    (tmp_path / "refs.json").write_text(json.dumps([[ref.salt, ref.digest] for ref in refs]))
    growth.serve_registered(
        argparse.Namespace(
            base=base, registered=5, refs=tmp_path / "refs.json", store=store, data=tmp_path,
            requests=8, seed=0, threads=1,
        )
    )  # fmt: skip
    told = json.loads(capsys.readouterr().out)
    assert told["tokens_per_s"] > 0
    assert told["resident_mib"] > 10
    assert told["start_cpu_s"] > 0
