"""Incremental detokenizing and stop strings, however the text is cut."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from engine.detokenize import Detokenizer, StopStrings, TextStream


class Bytes:
    """A vocabulary of the 256 bytes; 256 is a control token."""

    strips_first_space = False

    def token_bytes(self, token_id):
        return bytes([token_id]) if token_id < 256 else b"<|end|>"

    def is_control(self, token_id):
        return token_id == 256


def cut(text, at):
    """`text` in pieces, cut at these places (modulo its length)."""
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in at)})
    return [text[a:b] for a, b in pairwise(places)]


def expected(text, stops):
    """The definition: the match that ends first wins, of those the longest."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if s and text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], text[min(starts) : end]
    return text, None


class TestDetokenizer:
    def test_half_a_character_is_held_back(self):
        detokenizer = Detokenizer(Bytes())
        assert detokenizer.push([0xE6, 0x9D]) == ""
        assert detokenizer.push([0xB1]) == "東"

    def test_an_unfinished_character_ends_as_a_replacement(self):
        detokenizer = Detokenizer(Bytes())
        assert detokenizer.push([65, 0xE6]) == "A"
        assert detokenizer.finish() == "�"

    def test_control_tokens_write_nothing(self):
        assert Detokenizer(Bytes()).push([65, 256, 66]) == "AB"

    @given(st.binary(), st.lists(st.integers(0, 50)))
    def test_the_cutting_changes_nothing(self, data, at):
        detokenizer = Detokenizer(Bytes())
        pieces = [detokenizer.push(piece) for piece in cut(list(data), at)]
        assert "".join(pieces) + detokenizer.finish() == data.decode(errors="replace")


class TestStopStrings:
    def test_a_possible_beginning_is_held_back_until_it_is_none(self):
        stops = StopStrings(["END"])
        assert stops.push("the E").emit == "the "
        assert stops.push("N").emit == ""
        assert stops.push("t").emit == "ENt"

    def test_text_ends_before_the_stop_and_nothing_follows(self):
        stops = StopStrings(["END"])
        result = stops.push("the END of it")
        assert (result.emit, result.stopped) == ("the ", "END")
        assert stops.push("more").emit == ""
        assert stops.finish() == ""

    def test_of_several_stops_the_one_that_is_complete_first_wins(self):
        result = StopStrings(["abcd", "bc"]).push("xabcd")
        assert (result.emit, result.stopped) == ("xa", "bc")

    def test_of_stops_that_end_together_the_longest_wins(self):
        result = StopStrings(["c", "bc"]).push("abc")
        assert (result.emit, result.stopped) == ("a", "bc")

    def test_the_rest_comes_out_at_the_end(self):
        stops = StopStrings(["END"])
        assert stops.push("the EN").emit == "the "
        assert stops.finish() == "EN"

    @given(
        st.text("ab", max_size=20),
        st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
        st.lists(st.integers(0, 20)),
    )
    @example("aab", ["aab", "ab"], [1, 2])
    def test_the_cutting_changes_nothing(self, text, stops, at):
        stream = StopStrings(stops)
        out, stopped = "", None
        for piece in cut(text, at):
            result = stream.push(piece)
            out += result.emit
            stopped = stopped or result.stopped
        assert (out + stream.finish(), stopped) == expected(text, stops)


class TestTextStream:
    def test_usage_ends_with_the_token_that_completes_the_stop(self):
        piece = TextStream(Bytes(), ["cd"]).push(list(b"abcdef"))
        assert (piece.text, piece.used, piece.stopped) == ("ab", 4, "cd")

    def test_tokens_after_a_stop_count_for_nothing(self):
        stream = TextStream(Bytes(), ["a"])
        assert stream.push(list(b"a")).used == 1
        assert stream.push([]).text == ""

    def test_without_a_stop_every_token_counts(self):
        stream = TextStream(Bytes())
        assert stream.push(list(b"abc")).used == 3
        assert stream.finish().text == ""

    def test_what_was_held_back_comes_with_the_end(self):
        stream = TextStream(Bytes(), ["END"])
        assert stream.push(list(b"E")).text == ""
        assert stream.finish().text == "E"
