"""TLS from the real Envoy and the real filter to workers: who is believed, what is shown, what is said when it does not fit."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.certificates import Authority
from tests.stack.fake_worker import FakeWorker, decode_answer
from tests.stack.harness import Stack

NAME = "workers.baton.test"
BODY = {"model": "m", "prompt": "a prompt that is long enough", "max_tokens": 3}


class Site:
    """An authority, a certificate for the workers, and one for whoever calls them."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory)
        self.worker = self.authority.issue("worker", [NAME])
        self.caller = self.authority.issue("baton")
        self.directory = directory

    def settings(self, **more: Any) -> dict[str, Any]:
        return {
            "ca_file": str(self.authority.ca),
            "server_name": NAME,
            "cert_file": str(self.caller.cert),
            "key_file": str(self.caller.key),
            **more,
        }

    def stack(self, tls: Mapping[str, Any] | None = None, *, settings: Mapping[str, Any] | None = None) -> Stack:
        """Workers that want a certificate of this authority."""
        stack = Stack(settings=settings)
        for worker in (*stack.prefill, *stack.decode):
            worker.tls = self.worker.server(clients=self.authority.ca)
        secrets = str(self.directory / "secrets")
        stack.configure(workers={"tls": dict(tls or self.settings())}, envoy={"secrets_dir": secrets})
        return stack


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "tls")


async def ask(stack: Stack, **headers: str) -> tuple[int, str]:
    async with stack.http.post("/v1/completions", json=BODY, headers=headers) as response:
        return response.status, await response.text()


async def health(stack: Stack) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{stack.admin}/healthz") as response:
        found: dict[str, Any] = await response.json()
        return found


async def until(holds: Callable[[], Any], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("pin", ["exact", "original_dst"])
@pytest.mark.parametrize("via", ["envoy", "direct"])
async def test_prompt_goes_all_the_way_over_mtls(site: Site, via: str, pin: str) -> None:
    """Probes, scrapes, models, both legs: nobody reaches a worker without the certificate, and both legs are served."""
    stack = site.stack(settings={"envoy": {"pin": pin}, **({"prefill": {"via": "direct"}} if via == "direct" else {})})
    async with stack:
        assert (await ask(stack))[0] == 200
        assert len(stack.prefill[0].received) == 1
        assert [json["kv_transfer_params"]["do_remote_prefill"] for json in (r.json for r in stack.decode_received)] == [True]
        for worker in (*stack.prefill, *stack.decode):
            assert set(worker.named) == {"baton"}, "every caller of a worker has shown the certificate"


async def test_first_handoffs_and_releases_go_over_mtls(site: Site) -> None:
    """What the filter asks of workers by itself: the first handoff of a pair, and blocks that are given back."""
    stack = site.stack(settings={"warm_up": {"enabled": True}})

    async def refuse(request: web.Request, body: bytes) -> web.StreamResponse:
        if b"baton-release-no-such-model" in body:
            return web.json_response({"error": "no such model"}, status=404)
        return web.json_response({"error": "busy"}, status=503)

    async with stack:
        await until(lambda: all(worker.received for worker in stack.decode))  # one is enough to be ready
        for worker in stack.decode:
            worker.answer = refuse
        assert (await ask(stack))[0] == 503
        await until(lambda: any(b"baton-release" in record.body for record in stack.decode_received))
        metrics = await stack.metrics()
        assert metrics['baton_releases_total{outcome="failed"}'] == 0


def other_authority(site: Site) -> ssl.SSLContext:
    return Authority(site.directory / "other", "other").issue("stranger", [NAME]).server()


def other_name(site: Site) -> ssl.SSLContext:
    return site.authority.issue("elsewhere", ["elsewhere.test", "127.0.0.1"]).server()


def expired(site: Site) -> ssl.SSLContext:
    return site.authority.issue("old", [NAME], days=-1).server()


def plain(_: Site) -> None:
    return None


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (other_authority, "unable to get local issuer certificate"),
        (other_name, f"certificate is not valid for '{NAME}'"),
        (expired, "certificate has expired"),
        (plain, "it speaks no TLS"),
    ],
)
async def test_worker_that_is_not_believed_gets_nothing_and_is_named(
    site: Site, shown: Callable[[Site], ssl.SSLContext | None], words: str
) -> None:
    """It never becomes live; /healthz, the log and a metric say why; the others serve."""
    stack = site.stack()
    odd, good = stack.decode
    odd.tls = shown(site)
    async with stack:
        await stack.logged("endpoint_not_live")
        for _ in range(3):
            assert (await ask(stack))[0] == 200
        assert odd.received == []
        assert len(good.received) == 3
        faults = (await health(stack))["faults"]
        assert words in faults[odd.address]
        assert faults.keys() == {odd.address}
        (line,) = await stack.logged("endpoint_not_live")
        assert line["endpoint"] == odd.address and words in line["fault"]
        assert (await stack.metrics())['baton_probe_failures_total{kind="tls"}'] > 0


async def test_worker_that_does_not_believe_us_is_named(site: Site) -> None:
    """A worker that wants a certificate, and a filter that has none."""
    stack = site.stack({"ca_file": str(site.authority.ca), "server_name": NAME})
    strict, *others = (*stack.decode, *stack.prefill)
    for worker in others:
        worker.tls = site.worker.server()
    async with stack:
        await stack.logged("endpoint_not_live")
        assert (await ask(stack))[0] == 200
        faults = (await health(stack))["faults"]
        assert "does it want a certificate of ours" in faults[strict.address]


async def test_prefill_worker_whose_certificate_goes_bad_is_an_error_that_says_so(site: Site) -> None:
    """Between two probes: the client is answered at once, and told why."""
    stack = site.stack(settings={"prefill": {"via": "direct"}, "health": {"interval_s": 600.0}})

    async def closing(_: web.Request, __: bytes) -> web.StreamResponse:
        return web.Response(status=500, headers={"connection": "close"})

    async with stack:
        worker = stack.prefill[0]
        assert worker.tls is not None
        worker.answer = closing  # so that the next call needs a new connection
        assert (await ask(stack))[0] == 502
        worse = site.authority.issue("elsewhere", ["elsewhere.test"])
        worker.tls.load_cert_chain(worse.cert, worse.key)
        status, text = await ask(stack)
        assert status == 502
        assert f"certificate is not valid for '{NAME}'" in text


async def closing_answer(request: web.Request, body: bytes) -> web.StreamResponse:
    """As a decode worker does, with a new connection for each request."""
    response = await decode_answer(request, body)
    response.force_close()
    return response


async def test_new_authority_and_new_certificates_without_a_restart(site: Site) -> None:
    """Trust both, renew everything, trust only the new one: at each step requests go on, and at the end the old is worth
    nothing. Envoy's side and the filter's."""
    stack = site.stack()
    stack.decode[0].answer = closing_answer
    trusted = site.directory / "trusted.pem"
    trusted.write_bytes(site.authority.ca.read_bytes())
    stack.configure(workers={"tls": site.settings(ca_file=str(trusted))})
    fresh = Authority(site.directory / "fresh", "fresh")

    def trust(*authorities: Authority) -> None:
        renamed(trusted, b"".join(each.ca.read_bytes() for each in authorities))

    async def reloaded(times: int) -> None:
        name = 'baton_secret_reloads_total{name="workers.tls",outcome="reloaded"}'
        async with asyncio.timeout(20):
            while (await stack.metrics()).get(name, 0) < times:
                await asyncio.sleep(0.05)

    async with stack:
        stack.decode[1].healthy = False
        await until(
            lambda: any(
                line.get("endpoint") == stack.decode[1].address for line in stack.log_lines() if not line.get("live", True)
            )
        )
        assert (await ask(stack))[0] == 200
        trust(site.authority, fresh)
        await reloaded(1)
        worker = fresh.issue("worker-2", [NAME])
        both = site.directory / "both.pem"
        both.write_bytes(site.authority.ca.read_bytes() + fresh.ca.read_bytes())
        for each in (*stack.prefill, *stack.decode):
            assert each.tls is not None
            each.tls.load_verify_locations(cafile=both)
            each.tls.load_cert_chain(worker.cert, worker.key)
        await served(stack)
        before = (await stack.metrics())['baton_secret_reloads_total{name="workers.tls",outcome="reloaded"}']
        fresh.issue("baton-2", replace=site.caller)
        await reloaded(int(before) + 1)
        await shown_to(stack.decode[0], "baton-2", stack)
        trust(fresh)
        await reloaded(int(before) + 2)
        await served(stack)
        assert (await health(stack))["secrets"] == {}


async def test_half_of_a_new_pair_is_not_used_and_is_told(site: Site) -> None:
    """A certificate whose key has not come: what was there before is used on, and the state says so until the key is there."""
    stack = site.stack()
    key = site.caller.key.read_bytes()
    async with stack:
        site.authority.issue("baton-2", replace=site.caller)
        new_key = site.caller.key.read_bytes()
        renamed(site.caller.key, key)
        await until_health(stack, lambda found: "workers.tls" in found["secrets"])
        assert (await ask(stack))[0] == 200
        renamed(site.caller.key, new_key)
        await until_health(stack, lambda found: found["secrets"] == {})
        assert (await ask(stack))[0] == 200


def renamed(path: Path, content: bytes) -> None:
    beside = path.with_suffix(".fresh")
    beside.write_bytes(content)
    beside.chmod(0o600)
    beside.replace(path)


async def until_health(stack: Stack, holds: Callable[[dict[str, Any]], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds(await health(stack)):
            await asyncio.sleep(0.05)


async def served(stack: Stack) -> None:
    """Several requests, with new connections."""
    for _ in range(5):
        status, text = await ask(stack)
        assert status == 200, text


async def shown_to(worker: FakeWorker, name: str, stack: Stack) -> None:
    """Until a client's request came over a connection with the new certificate: Envoy reads it by itself."""
    async with asyncio.timeout(20):
        while True:
            worker.named.clear()
            await served(stack)
            if name in worker.named and "baton" not in worker.named:
                return
            await asyncio.sleep(0.1)


async def test_skipping_verification_is_said_loudly(site: Site) -> None:
    """It works with any certificate, and the log has a warning that says what that means."""
    stack = site.stack({"insecure_skip_verify": True})
    for worker in (*stack.prefill, *stack.decode):
        worker.tls = other_authority(site)
    async with stack:
        assert (await ask(stack))[0] == 200
        (line,) = await stack.logged("insecure_workers")
        assert line["level"] == "warning"


async def test_key_that_others_may_read_is_told(site: Site) -> None:
    """A private key with mode 644 is used, with a warning that names the file."""
    site.caller.key.chmod(0o644)
    async with site.stack() as stack:
        (line,) = await stack.logged("secret_open_to_others")
        assert str(site.caller.key) in line["why"]
