"""``python3 -m workers.health URL``: exit status 0 if ``GET URL`` is answered with 200, else 1. For images without curl.

Standard library only, so that it starts in some 50 ms: it is run every few seconds in every container.
"""

from __future__ import annotations

import http.client
import sys
import urllib.error
import urllib.request

_TIMEOUT_S = 4.0
_SHOWN_BYTES = 2_000


def main(arguments: list[str]) -> int:
    """The exit status; what the answer was is printed, as ``docker inspect`` shows it."""
    if len(arguments) != 1 or not arguments[0].startswith("http://"):
        print("usage: python3 -m workers.health http://HOST:PORT/PATH", file=sys.stderr)  # noqa: T201
        return 2
    try:
        with urllib.request.urlopen(arguments[0], timeout=_TIMEOUT_S) as reply:  # noqa: S310  (http:// only, see above)
            status, body = reply.status, reply.read(_SHOWN_BYTES)
    except urllib.error.HTTPError as error:
        status, body = error.code, error.read(_SHOWN_BYTES)
    except (OSError, http.client.HTTPException) as error:
        print(f"{arguments[0]}: {error}")  # noqa: T201
        return 1
    print(status, body.decode(errors="replace"))  # noqa: T201
    return 0 if status == 200 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
