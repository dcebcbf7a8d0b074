"""Choose the workers of one request. Round robin over the live endpoints of each role."""

from __future__ import annotations

from extproc.routing.pool import Endpoint, Pool, Role


class NoEndpointError(Exception):
    """No worker of a role is live."""

    def __init__(self, role: Role) -> None:
        super().__init__(f"no {role.value} worker is live")
        self.role = role


class RoundRobin:
    """Turns of its own for each role, so that the two legs do not lock step."""

    def __init__(self) -> None:
        self._turn = dict.fromkeys(Role, 0)

    def pick(self, pool: Pool, role: Role) -> Endpoint:
        """The next live endpoint of ``role``. Raises NoEndpointError."""
        candidates = pool.live(role)
        if not candidates:
            raise NoEndpointError(role)
        turn = self._turn[role]
        self._turn[role] = turn + 1
        return candidates[turn % len(candidates)]
