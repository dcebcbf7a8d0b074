"""The HTTP/2 core against the package h2 as client: it refuses whatever the RFC forbids, and both must see the same data."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.transport.http2.connection import Limits
from extproc.transport.http2.hpack import encode
from tests.unit.transport_peer import OK, REQUEST, Server

operations = st.lists(
    st.tuples(
        st.sampled_from(
            ["open", "send", "end", "reset", "answer", "data", "finish", "cut", "grant", "settings", "ping", "window"]
        ),
        st.integers(0, 5),
        st.integers(0, 40_000),
    ),
    max_size=60,
)


class Pair:
    """Client and server, and what either has sent and got."""

    def __init__(self) -> None:
        self.server = Server(Limits(stream_window_bytes=50_000))
        self.client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding=None))
        self.client.initiate_connection()
        self.to_server, self.to_client = dict[int, int](), dict[int, int]()
        self.from_server = dict[int, int]()
        self.ended_by_client, self.started, self.finished = set[int](), set[int](), set[int]()
        self.gone: set[int] = set()
        self.ended_at_client: set[int] = set()
        self.pump()

    def pump(self) -> None:
        """Everything that either has to say, until both are silent."""
        while True:
            upward = self.client.data_to_send()
            if upward:
                self.server.connection.receive(upward)
            out = self.server.connection.sender.out
            downward = b"".join(out)
            out.clear()
            if downward:
                for event in self.client.receive_data(downward):
                    self.heard(event)
            if not upward and not downward:
                return

    def heard(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.DataReceived):
            self.from_server[event.stream_id] = self.from_server.get(event.stream_id, 0) + len(event.data)
            self.client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamReset):
            self.gone.add(event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            self.ended_at_client.add(event.stream_id)
        elif isinstance(event, h2.events.ConnectionTerminated):
            raise AssertionError(f"the server ended the connection: {event.additional_data!r}")

    def pick(self, choice: int, of: set[int]) -> int | None:
        return sorted(of)[choice % len(of)] if of else None


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=150)
@given(operations)
def test_a_conversation_that_h2_finds_no_fault_with(plan: list[tuple[str, int, int]]) -> None:
    pair = Pair()
    client, server, connection = pair.client, pair.server, pair.server.connection
    for what, choice, amount in plan:
        sending = set(server.opened_streams) - pair.ended_by_client - pair.gone - pair.finished
        answering = {number for number in connection.streams if number not in pair.finished}
        if what == "open" and len(server.opened_streams) < 6:
            number = client.get_next_available_stream_id()
            client.send_headers(number, list(REQUEST))
        elif what in ("send", "end") and (number := pair.pick(choice, sending)) is not None:
            padding = choice or None
            window = min(client.local_flow_control_window(number), client.max_outbound_frame_size) - 6
            size = max(min(amount, window), 0)
            client.send_data(number, b"c" * size, what == "end", pad_length=padding if window >= 0 else None)
            pair.to_server[number] = pair.to_server.get(number, 0) + size
            if what == "end":
                pair.ended_by_client.add(number)
        elif what == "reset" and (number := pair.pick(choice, set(connection.streams))) is not None:
            client.reset_stream(number, h2.errors.ErrorCodes.CANCEL)
            pair.gone.add(number)
        elif what == "answer" and (number := pair.pick(choice, answering - pair.started)) is not None:
            connection.sender.headers(connection.streams[number], OK)
            pair.started.add(number)
        elif what == "data" and (number := pair.pick(choice, answering & pair.started)) is not None:
            connection.sender.data(connection.streams[number], b"12345", b"s" * amount)
            pair.to_client[number] = pair.to_client.get(number, 0) + amount + 5
        elif what == "finish" and (number := pair.pick(choice, answering & pair.started)) is not None:
            connection.end(connection.streams[number], encode(((b"grpc-status", b"0"),)))
            pair.finished.add(number)
        elif what == "cut" and (number := pair.pick(choice, answering)) is not None:
            connection.reset(connection.streams[number], 8)
            pair.gone.add(number)
        elif what == "grant" and (number := pair.pick(choice, set(connection.streams))) is not None:
            connection.grant(connection.streams[number], 50_000)
        elif what == "settings":
            client.update_settings({4: 10_000 + amount, 5: 16_384 + amount})
        elif what == "ping":
            client.ping(b"12345678")
        elif what == "window":
            client.increment_flow_control_window(amount + 1)
        pair.pump()
    client.increment_flow_control_window(1 << 24)
    for number in set(pair.to_client) - pair.gone - pair.ended_at_client:
        client.increment_flow_control_window(1 << 24, number)
    pair.pump()
    for number, sent in pair.to_client.items():
        if number not in pair.gone:
            assert pair.from_server.get(number, 0) == sent, "what the server sent is not what the client got"
    assert pair.finished - pair.gone <= pair.ended_at_client, "an answer has not ended"
    for number, sent in pair.to_server.items():
        if number not in pair.gone | pair.finished:
            told = server.told(number)
            assert sum(len(event[1]) for event in told if event[0] == "data") == sent, "what the client sent is not what came"
            assert (told[-1:] == [("ended",)]) == (number in pair.ended_by_client)
