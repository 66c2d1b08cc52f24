"""The example adapters as they are shipped: served by their base, small, and free of any path."""

from pathlib import Path

import pytest

from engine.adapters.manifest import check_adapter_folder
from engine.types import ModelDescription
from tests.adapter_files import tiny_description

EXAMPLES = Path(__file__).parents[4] / "examples"
NAMES = ["haiku", "json", "pirate"]


def smollm2_shapes() -> ModelDescription:
    """The packaged base by its shapes."""
    return tiny_description(layers=30, hidden=576, kv=192, mlp=1536, vocab=49152)


def test_there_are_three_and_each_has_its_lines() -> None:
    assert sorted(p.name for p in (EXAMPLES / "adapters").iterdir()) == NAMES
    assert sorted(p.stem for p in (EXAMPLES / "data").iterdir()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_example_passes_every_check(name: str) -> None:
    report = check_adapter_folder(EXAMPLES / "adapters" / name, smollm2_shapes(), 64)
    coverage = report.groups[2].figures
    assert [f.code for f in report.findings if f.severity == "fail"] == []
    assert coverage["placed"] == coverage["tensors"] > 0
    assert report.groups[0].figures["dtypes"] == ["BF16"]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_small_and_names_its_base_not_a_path(name: str) -> None:
    folder = EXAMPLES / "adapters" / name
    assert sum(file.stat().st_size for file in folder.iterdir()) < 6_000_000
    config = (folder / "adapter_config.json").read_text("utf-8")
    assert '"base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct"' in config
    assert "/home" not in config
    assert "/root" not in config


def test_the_three_differ_in_rank_targets_and_scale() -> None:
    reports = [
        check_adapter_folder(EXAMPLES / "adapters" / name, smollm2_shapes(), 64) for name in NAMES
    ]
    assert len({report.groups[2].figures["max_rank"] for report in reports}) == 3
    assert len({tuple(report.groups[2].figures["targets"]) for report in reports}) == 3
    assert [report.groups[1].figures["rslora"] for report in reports] == [False, True, False]
