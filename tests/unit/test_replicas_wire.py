"""What goes over the wire between replicas: who proves what, and what is refused. No sockets."""

from __future__ import annotations

import msgspec
import pytest

from extproc.replicas import handshake
from extproc.replicas.frames import FrameError, Opener, Sealer
from extproc.replicas.handshake import RefusedError

SECRET = b"sixteen bytes at least"


def pair(key: bytes | None = b"k" * 32) -> tuple[Sealer, Opener]:
    sealer, opener = Sealer(), Opener(1 << 16)
    sealer.key = opener.key = key
    return sealer, opener


@pytest.mark.parametrize("key", [None, b"k" * 32])
@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_messages_come_whole_however_the_stream_is_cut(key: bytes | None, piece: int) -> None:
    sealer, opener = pair(key)
    said = [b"", b"a", b"b" * 700, b"c"]
    stream = b"".join(map(sealer.seal, said))
    got = [message for at in range(0, len(stream), piece) for message in opener.feed(stream[at : at + piece])]
    assert got == said


def test_a_changed_byte_anywhere_is_noticed() -> None:
    sealer, _ = pair()
    frame = sealer.seal(b"a claim")
    for at in range(4, len(frame)):
        _, opener = pair()
        with pytest.raises(FrameError):
            list(opener.feed(frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]))


def test_a_message_is_taken_once_and_in_its_place() -> None:
    sealer, opener = pair()
    first, second, third = (sealer.seal(text) for text in (b"1", b"2", b"3"))
    assert list(opener.feed(first)) == [b"1"]
    with pytest.raises(FrameError):
        list(opener.feed(first))
    _, opener = pair()
    with pytest.raises(FrameError):
        list(opener.feed(first + third))
    _, opener = pair()
    assert list(opener.feed(first + second + third)) == [b"1", b"2", b"3"]


def test_a_frame_that_is_too_long_is_refused_by_its_length() -> None:
    _, opener = pair()
    with pytest.raises(FrameError, match="a frame of 16777216 bytes"):
        list(opener.feed((1 << 24).to_bytes(4, "big")))


def test_both_sides_come_to_the_same_keys_and_nobody_else_does() -> None:
    one, other = handshake.hello("aaaa", "one", ""), handshake.hello("bbbb", "other", "")
    said = handshake.encode(one), handshake.encode(other)
    made = handshake.keys(SECRET, *said)
    assert made == handshake.keys(SECRET, *said)
    assert made.dialer != made.acceptor, "what one says cannot be sent back to it"
    handshake.check(made.dialer, handshake.proof(made.dialer))
    for wrong in (
        handshake.keys(b"another secret of some length", *said),
        handshake.keys(SECRET, *reversed(said)),
        handshake.keys(SECRET, said[0], handshake.encode(handshake.hello("bbbb", "other", ""))),
    ):
        with pytest.raises(RefusedError) as refused:
            handshake.check(made.dialer, handshake.proof(wrong.dialer))
        assert refused.value.reason == "secret"


def test_the_highest_common_version_is_spoken() -> None:
    def speaks(lowest: int, highest: int) -> handshake.Hello:
        return msgspec.structs.replace(handshake.hello("aaaa", "one", "baton 9"), lowest=lowest, highest=highest)

    assert handshake.version(speaks(1, 3), speaks(2, 5)) == 3
    with pytest.raises(RefusedError) as refused:
        handshake.version(speaks(1, 1), speaks(2, 3))
    assert refused.value.reason == "version"
    assert str(refused.value) == "it speaks versions 2 to 3 of the format (baton 9), this one 1 to 1"


def test_a_hello_of_a_later_version_is_understood_as_far_as_needed() -> None:
    later = {**msgspec.to_builtins(handshake.hello("aaaa", "one", ""), builtin_types=(bytes,)), "compression": ["zstd"]}
    assert handshake.read(msgspec.msgpack.encode(later)).epoch == "aaaa"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        msgspec.msgpack.encode({"protocol": "other"}),
        handshake.encode(msgspec.structs.replace(handshake.hello("aaaa", "one", ""), nonce=b"short")),
        handshake.encode(msgspec.structs.replace(handshake.hello("aaaa", "one", ""), epoch="AA/../")),
        handshake.encode(msgspec.structs.replace(handshake.hello("aaaa", "one", ""), name="a\nb")),
        b"\x81" * 2000,
    ],
)
def test_what_is_no_hello_is_refused(data: bytes) -> None:
    with pytest.raises(RefusedError) as refused:
        handshake.read(data)
    assert refused.value.reason == "malformed"
