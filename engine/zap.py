"""ZAP (https://rfc.zeromq.org/spec/27/): admits the CURVE clients of an allow-list, nobody else.

CURVE alone encrypts but admits any key.
"""

import zmq
from zmq.utils import z85

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"loramux"


class ZapGate:
    """Answers libzmq's questions on a socket that the I/O thread polls."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: frozenset[str]) -> None:
        self._allowed = allowed
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ENDPOINT)

    def answer(self) -> None:
        """Takes one question and decides it."""
        frames = self.socket.recv_multipart()
        request_id = frames[1] if len(frames) > 1 else b""
        admitted = self.admits(frames)
        status, text = (b"200", b"OK") if admitted else (b"400", b"not on the allow-list")
        self.socket.send_multipart([b"1.0", request_id, status, text, b"", b""])

    def admits(self, frames: list[bytes]) -> bool:
        """[version, request id, domain, address, identity, mechanism, client key]"""
        if len(frames) != 7 or frames[0] != b"1.0" or frames[5] != b"CURVE":
            return False
        return len(frames[6]) == 32 and z85.encode(frames[6]).decode() in self._allowed

    def close(self) -> None:
        self.socket.close()
