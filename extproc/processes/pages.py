"""The admin port of the first process shows all of them: one page of metrics, one state, and the pages of each.

The others listen on sockets in the parent's folder, and only the first process goes there.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from extproc import bounded
from extproc.processes.member import Member

_TIMEOUT_S = 3.0
_MOST_BYTES = 64 << 20

_PASSED_ON = ("content-type", "cache-control")


class SiblingPages:
    """What the siblings show."""

    def __init__(self, member: Member) -> None:
        self._member = member

    async def _get(self, index: int, path: str, query: str = "") -> tuple[int, dict[str, str], bytes]:
        """One page of a sibling: status, headers, body. Raises aiohttp.ClientError, TimeoutError, OSError, TooLargeError."""
        where = self._member.admin_of(index).path
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=where), timeout=timeout) as session,
            session.get(f"http://sibling{path}{'?' if query else ''}{query}", allow_redirects=False) as response,
        ):
            headers = {name: response.headers[name] for name in _PASSED_ON if name in response.headers}
            return response.status, headers, await bounded.read(response, _MOST_BYTES)

    async def metrics(self, own: bytes) -> bytes:
        """The pages of all as one. A sibling that does not answer is missing; ``baton_siblings`` says so."""
        found = await asyncio.gather(*(self._get(index, "/metrics") for index in self._member.siblings), return_exceptions=True)
        return merged([own, *(each[2] for each in found if not isinstance(each, BaseException) and each[0] == 200)])

    async def health(self, ready: bool, details: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        """Whether any process is ready, and what each says."""
        siblings = self._member.siblings
        found = await asyncio.gather(*(self._get(index, "/healthz") for index in siblings), return_exceptions=True)
        processes: dict[str, Any] = {"0": {"ready": ready, "why": details.get("why"), "draining": details.get("draining")}}
        for index, each in zip(siblings, found, strict=True):
            if isinstance(each, BaseException):
                processes[str(index)] = {"ready": False, "why": f"no answer: {type(each).__name__}"}
                continue
            try:
                said = msgspec.json.decode(each[2], type=dict[str, Any])
            except msgspec.DecodeError:
                said = {"ready": False, "why": "no JSON"}
            processes[str(index)] = {name: said.get(name) for name in ("ready", "why", "draining")}
        return any(each["ready"] for each in processes.values()), {**details, "processes": processes}

    def routes(self) -> list[web.RouteDef]:
        """``/processes/1/…``: any page of that process that can be had by GET."""
        return [web.get(r"/processes/{index:\d+}/{path:.*}", self._pass_on)]

    async def _pass_on(self, request: web.Request) -> web.Response:
        index = int(request.match_info["index"])
        if index not in self._member.siblings:
            return web.json_response({"error": f"there is no process {index} beside this one"}, status=404)
        try:
            status, headers, body = await self._get(index, f"/{request.match_info['path']}", request.query_string)
        except (aiohttp.ClientError, TimeoutError, OSError, bounded.TooLargeError) as error:
            return web.json_response({"error": f"process {index} does not answer: {type(error).__name__}"}, status=502)
        return web.Response(status=status, headers=headers, body=body)


def merged(pages: list[bytes]) -> bytes:
    """Pages in Prometheus' text format as one: a family's samples must stand together, under one description."""
    families: dict[bytes, list[bytes]] = {}
    for page in pages:
        samples: list[bytes] = []
        name = b""
        for line in page.splitlines(keepends=True):
            if line.startswith((b"# HELP ", b"# TYPE ")):
                said = line.split(b" ", 3)[2]
                if said != name or said not in families:
                    name = said
                    known = name in families
                    samples = families.setdefault(name, [])
                if not known:
                    samples.append(line)
            elif line.strip() and not line.startswith(b"#"):
                samples.append(line)
    return b"".join(line for samples in families.values() for line in samples)
