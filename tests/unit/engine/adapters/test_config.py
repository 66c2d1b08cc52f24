"""adapter_config.json: verdicts on real files, and a case for each rule."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.adapters.config import MAX_CONFIG_BYTES, ConfigReport, check_config, lora_scale
from tests.adapter_files import config_json

CASES = Path(__file__).parents[3] / "data" / "adapter_configs"
INDEX = list(csv.DictReader((CASES / "index.csv").read_text("utf-8").splitlines()))


def check(**changes: Any) -> ConfigReport:
    return check_config(config_json(**changes), 256)


class TestRealFiles:
    @pytest.mark.parametrize("row", INDEX, ids=[row["file"] for row in INDEX])
    def test_verdict_and_codes_equal_the_index(self, row: dict[str, str]) -> None:
        report = check_config((CASES / row["file"]).read_bytes(), 256)
        expected = sorted(code for code in row["codes"].split(";") if code)
        assert (report.verdict, report.codes) == (row["verdict"], expected)

    def test_every_file_is_in_the_index_and_the_other_way_round(self) -> None:
        assert {row["file"] for row in INDEX} == {p.name for p in CASES.glob("*.json")}

    def test_a_config_is_there_exactly_when_it_was_not_rejected(self) -> None:
        for row in INDEX:
            report = check_config((CASES / row["file"]).read_bytes(), 256)
            assert (report.config is None) == (row["verdict"] == "reject")

    def test_the_rank_limit_is_the_callers(self) -> None:
        data = (CASES / "058-llama32-rank256-alpha512.json").read_bytes()
        report = check_config(data, 128)
        assert report.codes == ["rank_out_of_range"]
        assert "128" in report.findings[0].message


class TestRanks:
    @pytest.mark.parametrize("rank", [0, -1, 257, 1.5, 8.0, "8", True, [8], None])
    def test_anything_but_a_whole_number_in_range_is_refused(self, rank: object) -> None:
        report = check(r=rank)
        assert report.codes == ["rank_out_of_range"]
        assert report.findings[0].field == "r"

    @pytest.mark.parametrize(
        ("rank", "words", "never"),
        [
            ("8", 'the string "8"; write the number without quotes', "smaller"),
            (0, "r is 0; a rank is a whole number from 1 to 256", "smaller"),
            (-3, "r is -3; a rank is a whole number from 1 to 256", "smaller"),
            (1.5, "r is 1.5; a rank is a whole number", "smaller"),
            (300, "train with a smaller rank, or ask the operator", "whole number"),
        ],
    )
    def test_each_mistake_gets_the_remedy_that_helps(
        self, rank: object, words: str, never: str
    ) -> None:
        message = check(r=rank).findings[0].message
        assert words in message
        assert never not in message

    @pytest.mark.parametrize("rank", [1, 3, 256])
    def test_odd_ranks_up_to_the_limit_are_accepted(self, rank: int) -> None:
        report = check(r=rank)
        assert report.config is not None
        assert report.config.rank == rank

    def test_a_missing_rank_is_not_guessed(self) -> None:
        data = json.loads(config_json())
        del data["r"]
        assert check_config(json.dumps(data).encode(), 256).codes == ["rank_out_of_range"]

    def test_ranks_in_rank_pattern_obey_the_same_limit(self) -> None:
        report = check(rank_pattern={"q_proj": 8, "k_proj": 257, "v_proj": 0})
        assert report.codes == ["rank_out_of_range"]
        assert [f.field for f in report.findings] == ["rank_pattern.k_proj", "rank_pattern.v_proj"]


class TestAlpha:
    @pytest.mark.parametrize("alpha", [16, 32.0, 0.6, 1, 100000, -4])
    def test_any_finite_number_is_accepted(self, alpha: float) -> None:
        report = check(lora_alpha=alpha)
        assert report.config is not None
        assert report.config.alpha == alpha

    @pytest.mark.parametrize("alpha", ["16", True, None, [16], 10**30])
    def test_what_is_no_number_is_refused(self, alpha: object) -> None:
        assert check(lora_alpha=alpha).codes == ["alpha_invalid"]

    def test_a_missing_alpha_is_not_guessed(self) -> None:
        data = json.loads(config_json())
        del data["lora_alpha"]
        assert check_config(json.dumps(data).encode(), 256).codes == ["alpha_invalid"]

    @pytest.mark.parametrize("rank", [8, 16, 64])
    def test_the_scale_is_alpha_by_rank_or_by_its_root(self, rank: int) -> None:
        assert lora_scale(16, rank, rslora=False) == 16 / rank
        assert lora_scale(16, rank, rslora=True) == 16 / math.sqrt(rank)


class TestPatterns:
    def test_the_first_key_that_matches_decides(self) -> None:
        config = check(
            r=4, rank_pattern={"layers.0.self_attn.q_proj": 2, "q_proj": 8}, alpha_pattern={"v": 3}
        ).config
        assert config is not None
        assert config.rank_of("model.layers.0.self_attn.q_proj") == 2
        assert config.rank_of("model.layers.1.self_attn.q_proj") == 8
        assert config.rank_of("model.layers.1.self_attn.k_proj") == 4
        assert config.alpha_of("model.layers.0.self_attn.v_proj") == 8

    @pytest.mark.parametrize("key", [r"(q)\1", "(?=q)q", "q{2}", "[^q]", "(?i)q", "q++", "x" * 600])
    def test_syntax_beyond_the_subset_is_refused_by_name(self, key: str) -> None:
        report = check(rank_pattern={key: 4})
        assert report.codes == ["unsupported_pattern"]
        assert report.findings[0].field == "rank_pattern"

    def test_thousands_of_regex_keys_are_refused(self) -> None:
        report = check(rank_pattern={f"layers.{i}.*": 4 for i in range(100)})
        assert report.codes == ["unsupported_pattern"]

    def test_a_pattern_for_every_module_is_accepted(self) -> None:
        names = [f"model.layers.{i}.mlp.up_proj" for i in range(500)]
        assert check(rank_pattern=dict.fromkeys(names, 4)).verdict == "accept"


class TestRefusedByName:
    @pytest.mark.parametrize(
        ("key", "value", "code"),
        [
            ("use_dora", True, "unsupported_dora"),
            ("bias", "all", "unsupported_bias"),
            ("bias", "lora_only", "unsupported_bias"),
            ("lora_bias", True, "unsupported_bias"),
            ("modules_to_save", ["lm_head"], "unsupported_modules_to_save"),
            ("modules_to_save", "lm_head", "unsupported_modules_to_save"),
            ("trainable_token_indices", [0], "unsupported_trainable_tokens"),
            ("trainable_token_indices", {"embed": [0]}, "unsupported_trainable_tokens"),
            ("target_parameters", ["w"], "unsupported_target_parameters"),
            ("layer_replication", [[0, 4], [2, 5]], "unsupported_layer_replication"),
            ("use_qalora", True, "unsupported_qalora"),
            ("alora_invocation_tokens", [1], "unsupported_alora"),
            ("use_bdlora", {"nblocks": 2}, "unsupported_bdlora"),
            ("kasa_config", {"beta": 1e-4}, "unsupported_kasa"),
            ("arrow_config", {"top_k": 3}, "unsupported_arrow"),
            ("monteclora_config", {"n": 2}, "unsupported_monteclora"),
            ("enable_lora", [True], "unsupported_merged_linear"),
            ("loftq_config", {"loftq_bits": 4}, "unsupported_base_changing_init"),
            ("init_lora_weights", "pissa", "unsupported_base_changing_init"),
            ("init_lora_weights", "pissa_niter_16", "unsupported_base_changing_init"),
            ("init_lora_weights", "olora", "unsupported_base_changing_init"),
            ("init_lora_weights", "corda", "unsupported_base_changing_init"),
            ("init_lora_weights", "lora_ga", "unsupported_base_changing_init"),
            ("init_lora_weights", "loftq", "unsupported_base_changing_init"),
            ("init_lora_weights", "novel", "unsupported_init"),
            ("init_lora_weights", 3, "unsupported_init"),
            ("peft_type", "ADALORA", "unsupported_peft_type"),
            ("peft_type", None, "unsupported_peft_type"),
            ("task_type", "SEQ_CLS", "unsupported_task_type"),
            ("task_type", 1, "unsupported_task_type"),
            ("auto_mapping", {"base_model_class": "LlamaModel"}, "unsupported_model_class"),
            ("auto_mapping", {"base_model_class": 3}, "unsupported_model_class"),
            ("auto_mapping", "os.system", "invalid_value"),
            ("use_rslora", "yes", "invalid_value"),
            ("use_rslora", 1, "invalid_value"),
            ("target_modules", 7, "invalid_value"),
            ("target_modules", ["q_proj", 7], "invalid_value"),
            ("layers_to_transform", "0", "invalid_value"),
            ("layers_to_transform", [0, -1], "invalid_value"),
            ("layers_to_transform", [True], "invalid_value"),
            ("layers_pattern", 5, "invalid_value"),
            ("rank_pattern", [1], "invalid_value"),
            ("alpha_pattern", "x", "invalid_value"),
            ("alpha_pattern", {"q_proj": "x"}, "alpha_invalid"),
        ],
    )
    def test_each_has_its_own_code_and_names_its_field(
        self, key: str, value: object, code: str
    ) -> None:
        report = check(**{key: value})
        assert report.verdict == "reject"
        assert report.codes == [code]
        assert (report.findings[0].field or "").startswith(key)

    @pytest.mark.parametrize(
        "key",
        [
            "use_dora", "bias", "lora_bias", "modules_to_save", "trainable_token_indices",
            "target_parameters", "layer_replication", "use_qalora", "alora_invocation_tokens",
            "use_bdlora", "kasa_config", "arrow_config", "enable_lora", "loftq_config",
            "init_lora_weights", "task_type", "auto_mapping", "use_rslora", "target_modules",
            "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
            "fan_in_fan_out", "ensure_weight_tying", "base_model_name_or_path", "made_up",
        ],
    )  # fmt: skip
    def test_null_always_means_unset(self, key: str) -> None:
        assert check(**{key: None}).verdict == "accept"

    def test_all_reasons_are_given_at_once(self) -> None:
        assert check(use_dora=True, bias="all", r=0).codes == [
            "rank_out_of_range", "unsupported_bias", "unsupported_dora",
        ]  # fmt: skip


class TestAcceptedOrWarned:
    @pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", "mica"])
    def test_initialisations_that_leave_the_base_alone(self, init: object) -> None:
        assert check(init_lora_weights=init).verdict == "accept"

    @pytest.mark.parametrize("targets", [["q_proj"], "all-linear", r".*\.(q|v)_proj", "((((", None])
    def test_target_modules_are_never_run(self, targets: object) -> None:
        assert check(target_modules=targets).verdict == "accept"

    @pytest.mark.parametrize("spelling", ["causal_lm", "CausalLM", "TaskType.CAUSAL_LM"])
    def test_another_spelling_of_the_task_warns(self, spelling: str) -> None:
        assert check(task_type=spelling).codes == ["task_type_spelling"]

    def test_fan_in_fan_out_only_warns(self) -> None:
        assert check(fan_in_fan_out=True).codes == ["fan_in_fan_out_ignored"]

    @pytest.mark.parametrize("empty", [None, False, "", [], {}, 0])
    def test_an_unknown_key_that_says_nothing_is_silent(self, empty: object) -> None:
        assert check(later_invention=empty).verdict == "accept"

    def test_an_unknown_key_that_says_something_warns_with_its_name(self) -> None:
        report = check(later_invention=1)
        assert (report.verdict, report.codes) == ("warn", ["unknown_key:later_invention"])

    def test_a_single_layer_number_is_a_list_of_one(self) -> None:
        config = check(layers_to_transform=3, layers_pattern="layers").config
        assert config is not None
        assert config.layers_to_transform == (3,)

    def test_an_unsloth_flag_in_auto_mapping_is_no_class(self) -> None:
        assert check(auto_mapping={"unsloth_fixed": True}).verdict == "accept"


class TestStrictJson:
    @pytest.mark.parametrize(
        ("data", "code"),
        [
            (b"", "malformed_json"),
            (b"null", "malformed_json"),
            (b"[1]", "malformed_json"),
            (b"{'r': 1}", "malformed_json"),
            (b'{"r": 1,}', "malformed_json"),
            (b'{"r": 1} {"r": 2}', "malformed_json"),
            (b'{"r": NaN}', "malformed_json"),
            (b'{"r": -Infinity}', "malformed_json"),
            (b'{"r": 1e999}', "malformed_json"),
            (b'{"r": ' + b"9" * 5000 + b"}", "malformed_json"),
            (b'{"r": "\xff"}', "malformed_json"),
            (b'{"a": "\\ud800"}', "malformed_json"),
            (b'{"a": ["\\u0000"]}', "malformed_json"),
            (b'{"\\u0000": 1}', "malformed_json"),
            (b'{"r": 1, "r": 1}', "duplicate_key"),
            (b'{"a": {"b": 1, "b": 2}}', "duplicate_key"),
            (b'{"a": 1, "\\u0061": 2}', "duplicate_key"),
            (b"\xef\xbb\xbf{}", "byte_order_mark"),
            ('{"r": 1}'.encode("utf-16"), "byte_order_mark"),
            (b"[" * 100_000, "json_too_deep"),
            (b'{"a":' * 17 + b"1" + b"}" * 17, "json_too_deep"),
            (b" " * (MAX_CONFIG_BYTES + 1), "config_too_large"),
        ],
    )
    def test_what_is_not_one_plain_object_is_refused(self, data: bytes, code: str) -> None:
        report = check_config(data, 256)
        assert report.codes == [code]
        assert "save" in report.findings[0].message

    def test_brackets_inside_strings_are_not_nesting(self) -> None:
        assert check(revision="[" * 50 + '\\"' + "{" * 50).verdict == "accept"

    def test_sixteen_levels_are_not_too_deep(self) -> None:
        data = b'{"a":' * 16 + b"1" + b"}" * 16
        assert check_config(data, 256).codes == ["unsupported_peft_type"]

    def test_a_report_on_fifty_thousand_unknown_keys_stays_small(self) -> None:
        report = check(**{f"k{i}": 1 for i in range(15_000)})
        assert len(report.findings) == 20
        assert report.findings[-1].figures["more"] == 15_000 - 20

    def test_what_is_shown_of_a_value_is_short_and_printable(self) -> None:
        report = check(use_dora="\u202e\x1b[31m" + "x" * 5000)
        message = report.findings[0].message
        assert message.isascii()
        assert message.isprintable()
        assert len(message) < 200

    @given(st.binary(max_size=300))
    def test_no_bytes_raise(self, data: bytes) -> None:
        assert check_config(data, 256).verdict == "reject"

    @given(
        st.dictionaries(
            st.sampled_from([*json.loads(config_json()), "use_dora", "auto_mapping", "bias",
                                                               "layers_to_transform", "zzz"]),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.text() | st.floats(),
                lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
                max_leaves=5,
            ),
        )
    )  # fmt: skip
    def test_no_values_raise(self, changes: dict[str, Any]) -> None:
        report = check(**changes)
        assert (report.config is None) == (report.verdict == "reject")
