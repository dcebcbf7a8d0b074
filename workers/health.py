"""``python3 -m workers.health URL…``: exit status 0 if ``GET URL`` is answered with 200, else 1. For images without curl.

Of several, the first that answers in HTTP decides: what an image serves at a port depends on how it is started.

With https any certificate is taken: what is asked runs in the same container. BATON_SSL_CERTFILE and BATON_SSL_KEYFILE are
shown to a server that wants a certificate.

Standard library only, so that it starts in some 50 ms: it is run every few seconds in every container.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
import urllib.error
import urllib.request

_TIMEOUT_S = 4.0
"""Of all addresses together, in equal shares: less than what the images give the check."""
_SHOWN_BYTES = 2_000


def main(arguments: list[str]) -> int:
    """The exit status; what the answer was is printed, as ``docker inspect`` shows it."""
    if not arguments or not all(url.startswith(("http://", "https://")) for url in arguments):
        print("usage: python3 -m workers.health http[s]://HOST:PORT/PATH …", file=sys.stderr)  # noqa: T201
        return 2
    silent = []
    for url in arguments:
        try:
            status, body = _ask(url, _TIMEOUT_S / len(arguments))
        except (OSError, http.client.HTTPException) as error:
            silent.append(f"{url}: {error!r}" if not str(error) else f"{url}: {error}")
            continue
        print(status, body.decode(errors="replace"))  # noqa: T201
        return 0 if status == 200 else 1
    print("\n".join(silent))  # noqa: T201
    return 1


def _ask(url: str, timeout_s: float) -> tuple[int, bytes]:
    """Status and the beginning of the answer. Raises OSError and HTTPException where there is none, or none in HTTP/1."""
    try:
        context = _tls() if url.startswith("https:") else None
        with urllib.request.urlopen(url, timeout=timeout_s, context=context) as reply:  # noqa: S310  (see above)
            return reply.status, reply.read(_SHOWN_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(_SHOWN_BYTES)


def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    own = os.environ.get("BATON_SSL_CERTFILE"), os.environ.get("BATON_SSL_KEYFILE")
    if own[0] and own[1]:
        context.load_cert_chain(own[0], own[1], password="")
    return context


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
