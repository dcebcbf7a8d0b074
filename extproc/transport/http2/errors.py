"""What can go wrong on a connection, with the codes of RFC 9113 section 7."""

from __future__ import annotations

from typing import Final

NO_ERROR: Final = 0x0
PROTOCOL_ERROR: Final = 0x1
INTERNAL_ERROR: Final = 0x2
FLOW_CONTROL_ERROR: Final = 0x3
STREAM_CLOSED: Final = 0x5
FRAME_SIZE_ERROR: Final = 0x6
REFUSED_STREAM: Final = 0x7
CANCEL: Final = 0x8
COMPRESSION_ERROR: Final = 0x9
ENHANCE_YOUR_CALM: Final = 0xB


class ConnectionFault(Exception):  # noqa: N818 - a fault of the peer's, not of ours
    """The connection must end (section 5.4.1)."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class StreamFault(Exception):  # noqa: N818
    """One stream must end (section 5.4.2)."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code
