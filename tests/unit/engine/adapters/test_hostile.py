"""Every hostile kind of file is refused in its group of checks, with its code and a sentence."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.adapters.findings import CODES, CheckGroup, Finding, FindingList, clip
from engine.adapters.manifest import GROUPS, check_adapter_folder, iterate_checks
from tests.adapter_files import (
    HOSTILE,
    AdapterFiles,
    HostileCase,
    config_json,
    good_adapter,
    tiny_description,
)

TINY = tiny_description()


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.name)
def test_a_hostile_file_is_refused_by_name(case: HostileCase, tmp_path: Path) -> None:
    report = check_adapter_folder(case.build(TINY).write(tmp_path), TINY, 256)
    assert report.status == "fail"
    group = next(group for group in report.groups if group.name == case.group)
    assert group.status == "fail"
    failed = {f.code: f for f in group.findings if f.severity == "fail"}
    assert case.code in failed
    assert len(failed[case.code].message.split()) >= 3
    assert all(f.message.isprintable() for f in report.findings)
    json.dumps(report.as_json()).encode()


def test_there_are_enough_kinds_and_their_names_are_unique() -> None:
    assert len({case.name for case in HOSTILE}) == len(HOSTILE) >= 40


def test_every_code_that_fails_has_a_hostile_file(tmp_path: Path) -> None:
    failing = {code for code, (_, severity, _) in CODES.items() if severity == "fail"}
    reached = {case.code for case in HOSTILE}
    # a link, an oversize file and a file that changes while it is read have tests of their own
    assert failing - reached == {"not_a_regular_file", "file_too_large", "file_changed"}


def test_codes_lie_in_the_group_that_the_table_gives(tmp_path: Path) -> None:
    for number, case in enumerate(HOSTILE):
        folder = case.build(TINY).write(tmp_path / str(number))
        for group in iterate_checks(folder, TINY, 256):
            for found in group.findings:
                assert CODES[found.code][:2] == (group.name, found.severity)


class TestTheReport:
    def test_a_good_adapter_passes_every_group(self, tmp_path: Path) -> None:
        report = check_adapter_folder(good_adapter(TINY).write(tmp_path), TINY, 64)
        assert [(g.name, g.status) for g in report.groups] == [(n, "pass") for n in GROUPS]
        assert report.groups[2].figures["coverage"] == "28 of 28 tensors placed"
        assert report.groups[2].figures["max_rank"] == 4
        assert report.groups[3].figures["modules"] == 14
        assert report.codes == []

    @pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
    def test_every_dtype_is_served(self, tmp_path: Path, dtype: str) -> None:
        folder = good_adapter(TINY, dtype=dtype).write(tmp_path)
        assert check_adapter_folder(folder, TINY, 64).status == "pass"

    def test_a_broken_container_does_not_hide_a_bad_config(self, tmp_path: Path) -> None:
        files = AdapterFiles(config_json(use_dora=True), b"")
        report = check_adapter_folder(files.write(tmp_path), TINY, 64)
        assert [g.status for g in report.groups] == ["fail", "fail", "skipped", "skipped"]
        assert report.codes == ["empty_file", "unsupported_dora"]

    def test_the_lower_of_both_rank_limits_counts(self, tmp_path: Path) -> None:
        folder = good_adapter(TINY, rank=32).write(tmp_path)
        assert check_adapter_folder(folder, TINY, 16).codes == ["rank_out_of_range"]
        assert check_adapter_folder(folder, tiny_description(max_rank=8), 64).codes == [
            "rank_out_of_range"
        ]

    def test_a_warning_is_the_status_when_nothing_fails(self, tmp_path: Path) -> None:
        files = good_adapter(TINY, config={"note": "mine"})
        report = check_adapter_folder(files.write(tmp_path), TINY, 64)
        assert (report.status, report.codes) == ("warn", ["unknown_key"])

    def test_other_files_are_mentioned_and_ignored(self, tmp_path: Path) -> None:
        folder = good_adapter(TINY).write(tmp_path)
        (folder / "README.md").write_text("hello")
        report = check_adapter_folder(folder, TINY, 64)
        assert report.status == "pass"
        assert [f.code for f in report.findings] == ["extra_file_ignored"]

    def test_an_oversize_file_is_not_read(self, tmp_path: Path) -> None:
        folder = good_adapter(TINY).write(tmp_path)
        report = check_adapter_folder(folder, TINY, 64, max_bytes=100)
        assert report.codes == ["file_too_large"]

    @pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
    def test_a_link_is_refused(self, tmp_path: Path, name: str) -> None:
        folder = good_adapter(TINY).write(tmp_path / "adapter")
        (folder / name).rename(tmp_path / "elsewhere")
        (folder / name).symlink_to(tmp_path / "elsewhere")
        assert check_adapter_folder(folder, TINY, 64).codes == ["not_a_regular_file"]

    def test_a_file_that_shrinks_while_it_is_checked_fails(self, tmp_path: Path) -> None:
        folder = good_adapter(TINY).write(tmp_path)
        groups: list[CheckGroup] = []
        for group in iterate_checks(folder, TINY, 64):
            groups.append(group)
            if group.name == "coverage":
                (folder / "adapter_model.safetensors").write_bytes(b"short")
        assert [f.code for f in groups[-1].findings] == ["file_changed"]

    def test_a_folder_that_is_not_there_is_a_report_too(self, tmp_path: Path) -> None:
        assert check_adapter_folder(tmp_path / "no", TINY, 64).codes == ["missing_file"]


class TestShowingValues:
    def test_a_clipped_value_is_one_ascii_line(self) -> None:
        assert clip("a\n\u202eb\ud800") == "a\\x0a\\u202eb\\ud800"
        assert len(clip("x" * 500)) == 60

    def test_the_21st_finding_of_a_code_is_counted_not_kept(self) -> None:
        found = FindingList()
        for number in range(25):
            found.add("shape_mismatch", f"tensor {number}")
        found.add("missing_pair", "one")
        kept = found.done()
        assert [f.code for f in kept].count("shape_mismatch") == 20
        assert kept[19].message == "tensor 19 (and 5 more of this kind)"
        assert isinstance(kept[-1], Finding)


def test_the_checks_import_no_torch() -> None:
    code = "import sys, engine.adapters.manifest, engine.adapters.store, engine.adapters.blob; " \
           "sys.exit('torch' in sys.modules or 'safetensors' in sys.modules)"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
