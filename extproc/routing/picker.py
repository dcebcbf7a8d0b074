"""Choose the workers of one request. Round robin over the live endpoints of each role."""

from __future__ import annotations

from collections.abc import Collection

from extproc.routing.pool import Endpoint, Pool, Role


class NoEndpointError(Exception):
    """No worker of a role can take the request."""

    def __init__(self, role: Role, model: str | None = None) -> None:
        """``model`` is given where workers are live, but none serves it."""
        what = f"serves the model {model!r}" if model is not None else "is live"
        super().__init__(f"no {role.value} worker {what}")
        self.role = role
        self.model = model


class RoundRobin:
    """Turns of its own for each role, so that the two legs do not lock step."""

    def __init__(self) -> None:
        self._turn = dict.fromkeys(Role, 0)

    def pick(self, pool: Pool, role: Role, *, model: str | None = None, exclude: Collection[str] = ()) -> Endpoint:
        """The next live endpoint of ``role`` that serves ``model``, but none of the addresses in ``exclude``.

        Raises NoEndpointError.
        """
        live = pool.live(role)
        serving = [endpoint for endpoint in live if endpoint.serves(model)]
        candidates = [endpoint for endpoint in serving if endpoint.address not in exclude]
        if not candidates:
            raise NoEndpointError(role, model if live and not serving else None)
        turn = self._turn[role]
        if not exclude:  # a second try takes no turn, or a worker that fails would get every other request
            self._turn[role] = turn + 1
        return candidates[turn % len(candidates)]
