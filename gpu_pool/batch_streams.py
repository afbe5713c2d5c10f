"""The streams of one claimed batch: what its model adds to them goes up, and who does not wait any more goes down."""

from collections.abc import Callable, Sequence

from gpu_pool.model_process.messages import Piece
from gpu_pool.worker.streams import Outgoing
from scheduler.increments import LOST, Address, Increment, read_address
from scheduler.protocol.batches import ClaimedRequest

Drop = Callable[[Sequence[int]], None]


class BatchStreams:
    """From claim to end. A batch without streams costs nothing but this."""

    def __init__(self, requests: Sequence[ClaimedRequest], outgoing: Outgoing) -> None:
        self._attempts = {request.id: request.attempt for request in requests}
        self._outgoing = outgoing
        self._begun: dict[str, Address] = {}
        self._ids: Sequence[str] = ()
        self._drop: Drop | None = None
        self._gone: set[str] = set()

    @property
    def members(self) -> set[str]:
        """Who waits, as far as is known."""
        return self._attempts.keys() - self._gone

    def waiting(self, requests: Sequence[ClaimedRequest]) -> Sequence[ClaimedRequest]:
        """Those that still have to be run."""
        return [request for request in requests if request.id not in self._gone] if self._gone else requests

    def begin(self, ids: Sequence[str], drop: Drop) -> None:
        """The model runs these, in this order, and can be told of places that nobody waits for."""
        self._ids, self._drop = ids, drop

    def end(self) -> None:
        """The model has ended with them."""
        self._drop = None

    def hear(self, pieces: Sequence[Piece]) -> None:
        """The model has added these."""
        for piece in pieces:
            address = read_address(piece.stream)
            if address is None or not 0 <= piece.place < len(self._ids):
                continue
            request_id = self._ids[piece.place]
            self._begun[request_id] = address
            self._tell(request_id, address, piece.offset, piece.text)

    def only(self, left: frozenset[str]) -> None:
        """Nobody but these waits any more."""
        gone = self.members - left
        self._gone |= gone
        if self._drop is not None and (places := [i for i, each in enumerate(self._ids) if each in gone]):
            self._drop(places)

    def lost(self) -> None:
        """The run is lost: what was said of it will not be gone on with."""
        for request_id, address in self._begun.items():
            self._tell(request_id, address, LOST, "")
        self._begun = {}

    def _tell(self, request_id: str, address: Address, offset: int, text: str) -> None:
        increment = Increment(request_id, address.nonce, self._attempts[request_id], offset, text)
        self._outgoing.add(address, increment)
