"""A client as plain as one can be, in a process of its own: it prints when the first byte of an answer's body came, in seconds
from when it sent the request. ``python -m tests.stack.blunt_client PORT COUNT TOKENS MODEL [HEADER:VALUE …]``"""

from __future__ import annotations

import json
import os
import socket
import sys
import time


def first_byte(port: int, tokens: int, model: str, name: str, headers: list[str]) -> float:
    """One streamed request."""
    prompt = f"Say something. {os.urandom(8).hex()}"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": tokens, **options}).encode()
    lines = ["POST /v1/completions HTTP/1.1", "host: x", "connection: close", "content-type: application/json"]
    lines += [f"x-request-id: {name}", f"content-length: {len(body)}", *headers]
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        sent = time.perf_counter()
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        answer = b""
        while b"data: " not in answer:
            answer += connection.recv(65536) or sys.exit(f"the answer ended: {answer!r}")
        came = time.perf_counter()
        while connection.recv(65536):
            pass
    return came - sent


def main() -> None:
    """See above."""
    port, count, tokens, model, *headers = sys.argv[1:]
    for number in range(int(count)):
        name = f"blunt-{os.getpid()}-{number}"
        print(name, first_byte(int(port), int(tokens), model, name, headers), flush=True)


if __name__ == "__main__":
    main()
