"""The endpoints that ask about the server: health, load, version, models, metrics, and what unknown paths get."""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from workers.sim.errors import internal

if TYPE_CHECKING:
    from workers.sim.worker import Worker

_log = logging.getLogger(__name__)

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""Paths that begin so want the key (vLLM 0.32, entrypoints/serve/middleware/authenticate.py)."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def framework_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Unknown paths and methods, in the web framework's words; what nobody expected, as vLLM answers it."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        return web.json_response({"detail": "Not Found"}, status=404)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return web.json_response({"detail": "Method Not Allowed"}, status=405, headers={"allow": allowed})
    except web.HTTPRequestEntityTooLarge:
        return web.json_response({"detail": "Request Entity Too Large"}, status=413)
    except web.HTTPException:
        raise
    except ConnectionResetError:
        return web.Response(status=499)  # the client is gone in the middle of a stream
    except Exception:
        _log.exception("%s %s", request.method, request.path)
        return web.json_response(internal().body(), status=500)


def authenticated(key: str) -> Any:
    """What comes to the guarded paths without the key is turned down before it is looked at, as vLLM does it."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        known = scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), key.encode())
        if known or request.method == "OPTIONS" or not request.path.startswith(_GUARDED):
            return await handler(request)
        return web.json_response({"error": "Unauthorized"}, status=401)

    return check


def closed_while_down(worker: Worker) -> Any:
    """A connection that was accepted while the worker went down gets no answer."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if worker.up:
            return await handler(request)
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=503)

    return check


class _Collector:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterable[Metric]:
        return self._worker.metrics.families(self._worker.engine)


def add_routes(app: web.Application, worker: Worker) -> None:
    """The routes of one worker."""
    from workers.sim.worker import VERSION

    created = int(time.time())
    registry = CollectorRegistry()
    registry.register(_Collector(worker))

    async def health(_: web.Request) -> web.Response:
        return web.Response(status=503 if worker.engine.dead else 200)

    async def load(_: web.Request) -> web.Response:
        tracked = worker.options.enable_server_load_tracking
        return web.json_response({"server_load": worker.serving.in_flight if tracked else 0})

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def models(_: web.Request) -> web.Response:
        model = worker.model
        cards = [_card(name, model.names[0], None, model.max_model_len, created) for name in model.names]
        cards += [_card(name, path, model.names[0], None, created) for name, path in model.adapters.items()]
        return web.json_response({"object": "list", "data": cards})

    async def metrics(_: web.Request) -> web.Response:
        headers = {"content-type": "text/plain; version=1.0.0; charset=utf-8"}
        return web.Response(body=generate_latest(registry), headers=headers)

    async def event_sources(_: web.Request) -> web.Response:
        if worker.publisher is None:
            return web.json_response({})
        options = worker.options
        source = {
            "endpoint": options.events_endpoint,
            "replay_endpoint": options.events_replay_endpoint,
            "topic": options.events_topic,
        }
        return web.json_response({"0": source})

    app.router.add_get("/health", health)
    app.router.add_route("*", "/ping", health)
    app.router.add_get("/load", load)
    app.router.add_get("/version", version)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/kv_event_sources", event_sources)


def _card(name: str, root: str, parent: str | None, max_model_len: int | None, created: int) -> dict[str, object]:
    permission = {
        "id": f"modelperm-{uuid.uuid4().hex}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [permission],
    }
