"""``python3 -m workers.health URL``: exit status 0 if ``GET URL`` is answered with 200, else 1. For images without curl.

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
_SHOWN_BYTES = 2_000


def main(arguments: list[str]) -> int:
    """The exit status; what the answer was is printed, as ``docker inspect`` shows it."""
    if len(arguments) != 1 or not arguments[0].startswith(("http://", "https://")):
        print("usage: python3 -m workers.health http[s]://HOST:PORT/PATH", file=sys.stderr)  # noqa: T201
        return 2
    try:
        context = _tls() if arguments[0].startswith("https:") else None
        with urllib.request.urlopen(arguments[0], timeout=_TIMEOUT_S, context=context) as reply:  # noqa: S310  (see above)
            status, body = reply.status, reply.read(_SHOWN_BYTES)
    except urllib.error.HTTPError as error:
        status, body = error.code, error.read(_SHOWN_BYTES)
    except (OSError, http.client.HTTPException) as error:
        print(f"{arguments[0]}: {error}")  # noqa: T201
        return 1
    print(status, body.decode(errors="replace"))  # noqa: T201
    return 0 if status == 200 else 1


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
