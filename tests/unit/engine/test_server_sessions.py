"""Whose requests are whose, and when they are over."""

from engine.sessions import Sessions
from engine.types import RequestOutput, RequestUsage

USAGE = RequestUsage(1, 0, 1, 0.0, 0.0, 1.0, 1.0)


def opened(*peers):
    sessions = Sessions(timeout_ms=1000.0)
    for peer in peers:
        sessions.open(peer, client_id=f"client-{peer!r}", now_ms=0.0)
    return sessions


class TestSessions:
    def test_a_peer_without_a_hello_is_a_stranger(self):
        assert not opened(b"a").seen(b"b", 0.0)

    def test_a_request_belongs_to_one_client(self):
        sessions = opened(b"a", b"b")
        assert sessions.claim(b"a", "r")
        assert not sessions.claim(b"b", "r")
        assert sessions.owns(b"a", "r")
        assert not sessions.owns(b"b", "r")

    def test_ending_a_session_orphans_its_requests_alone(self):
        sessions = opened(b"a", b"b")
        sessions.claim(b"a", "r1")
        sessions.claim(b"a", "r2")
        sessions.claim(b"b", "r3")
        assert sessions.end(b"a") == ["r1", "r2"]
        assert sessions.end(b"a") == []
        assert sessions.owns(b"b", "r3")

    def test_a_second_hello_ends_what_the_client_had(self):
        sessions = opened(b"a")
        sessions.claim(b"a", "r")
        assert sessions.open(b"new", f"client-{b'a'!r}", 1.0) == ["r"]
        assert sessions.peers == [b"new"]

    def test_silence_is_noticed_after_the_time_out(self):
        sessions = opened(b"a", b"b")
        sessions.seen(b"b", 900.0)
        assert sessions.silent(1000.0) == []
        assert sessions.silent(1001.0) == [b"a"]


class TestRouting:
    def test_outputs_of_a_step_go_to_their_owners(self):
        sessions = opened(b"a", b"b")
        sessions.claim(b"a", "r1")
        sessions.claim(b"b", "r2")
        outputs = [RequestOutput("r1", 0), RequestOutput("r2", 0), RequestOutput("nobodys", 0)]
        assert sessions.route(outputs) == {b"a": outputs[:1], b"b": outputs[1:2]}

    def test_the_last_output_releases_the_id(self):
        sessions = opened(b"a")
        sessions.claim(b"a", "r")
        mail = sessions.route([RequestOutput("r", 0), RequestOutput("r", 1, usage=USAGE)])
        assert len(mail[b"a"]) == 2
        assert sessions.claim(b"a", "r")
        assert sessions.end(b"a") == ["r"]
