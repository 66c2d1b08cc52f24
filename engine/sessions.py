"""Who is connected to the engine and which requests are whose. No sockets, no clock of its own."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.types import RequestOutput

Peer = bytes
"""zmq's routing id of one connection."""


@dataclass(slots=True)
class Session:
    client_id: str
    seen_ms: float
    requests: set[str] = field(default_factory=set)


class Sessions:
    """Every method that ends a session returns the request ids that must now be cancelled."""

    def __init__(self, timeout_ms: float) -> None:
        self._timeout_ms = timeout_ms
        self._by_peer: dict[Peer, Session] = {}
        self._owner: dict[str, Peer] = {}

    def open(self, peer: Peer, client_id: str, now_ms: float) -> list[str]:
        """A hello; whatever the same peer or the same client had before is over."""
        orphans: list[str] = []
        for other, session in list(self._by_peer.items()):
            if other == peer or session.client_id == client_id:
                orphans += self.end(other)
        self._by_peer[peer] = Session(client_id, now_ms)
        return orphans

    def end(self, peer: Peer) -> list[str]:
        session = self._by_peer.pop(peer, None)
        if session is None:
            return []
        for request_id in session.requests:
            del self._owner[request_id]
        return sorted(session.requests)

    def seen(self, peer: Peer, now_ms: float) -> bool:
        """Notes a sign of life; False when this peer has no session."""
        session = self._by_peer.get(peer)
        if session is not None:
            session.seen_ms = now_ms
        return session is not None

    def silent(self, now_ms: float) -> list[Peer]:
        """Peers that have given no sign of life for too long."""
        return [
            peer
            for peer, session in self._by_peer.items()
            if now_ms - session.seen_ms > self._timeout_ms
        ]

    @property
    def peers(self) -> list[Peer]:
        return list(self._by_peer)

    def claim(self, peer: Peer, request_id: str) -> bool:
        """Makes the request this peer's; False when it is somebody's already."""
        if request_id in self._owner:
            return False
        self._owner[request_id] = peer
        self._by_peer[peer].requests.add(request_id)
        return True

    def owns(self, peer: Peer, request_id: str) -> bool:
        return self._owner.get(request_id) == peer

    def release(self, request_id: str) -> Peer | None:
        """Forgets a request that has ended; its owner, if that is still there."""
        peer = self._owner.pop(request_id, None)
        if peer is not None:
            self._by_peer[peer].requests.discard(request_id)
        return peer

    def route(self, outputs: Iterable[RequestOutput]) -> dict[Peer, list[RequestOutput]]:
        """One step's outputs by peer. Those of nobody are left out; a last output releases."""
        mail: dict[Peer, list[RequestOutput]] = defaultdict(list)
        for output in outputs:
            peer = self._owner.get(output.request_id)
            if peer is not None:
                mail[peer].append(output)
            if output.usage is not None:
                self.release(output.request_id)
        return dict(mail)
