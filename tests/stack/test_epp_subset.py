"""The gateway's subset hint, and the headers of the conformance suite, behind the real Envoy."""

from __future__ import annotations

import pytest

from tests.stack.inference_pool import HEADER, METADATA, Mesh, Shape

pytestmark = pytest.mark.asyncio(loop_scope="session")

SELECT, SERVED, SELECTED = (
    "test-epp-endpoint-selection",
    "x-conformance-test-served-endpoint",
    "x-conformance-test-selected-endpoint",
)
SUITE = {"epp": {"conformance_headers": True}}


@pytest.mark.parametrize("shape", ["istio", "header"])
async def test_only_workers_of_the_hint_are_chosen(shape: Shape) -> None:
    """Prompts, and what is none; a prefill worker in it changes nothing."""
    mesh = Mesh(shape, decode=3)
    mesh.subset = [mesh.decode[2].address, mesh.prefill[0].address, "127.0.0.1:1"]
    async with mesh:
        for _ in range(4):
            code, _, headers = await mesh.ask()
            assert (code, headers[HEADER], headers[METADATA]) == (200, mesh.decode[2].address, mesh.decode[2].address)
        async with mesh.http.get("/version") as response:
            assert response.headers[HEADER] == mesh.decode[2].address
        assert len(mesh.prefill[0].received) == 4
        await mesh.at_rest()


@pytest.mark.parametrize("hint", ["empty", "unknown", "prefill only"])
async def test_a_hint_without_an_eligible_worker_is_503_at_once(hint: str) -> None:
    mesh = Mesh(decode=2)
    mesh.subset = {"empty": [], "unknown": ["127.0.0.1:1"], "prefill only": [mesh.prefill[0].address]}[hint]
    async with mesh:
        code, text, _ = await mesh.ask()
        assert (code, '"code":"no_subset_worker"' in text) == (503, True)
        async with mesh.http.get("/version") as response:
            assert response.status == 503
        assert not any(worker.received for worker in (*mesh.prefill, *mesh.decode))
        await mesh.at_rest()


async def test_the_suite_chooses_among_the_pools_workers_and_hears_who_served() -> None:
    """GatewayFollowingEPPRouting, GatewayDestinationEndpointServed: one endpoint, two, all, by IP or by address."""
    async with Mesh(decode=3, settings=SUITE) as mesh:
        addresses = [worker.address for worker in mesh.decode]
        for wanted in (addresses[2:], addresses[:2], addresses):
            seen = set()
            for _ in range(3 * len(wanted)):
                code, _, headers = await mesh.ask("/primary-gateway-test", headers={SELECT: ",".join(wanted)})
                assert code == 200
                assert headers[SERVED] == headers[SELECTED] == headers[HEADER]
                seen.add(headers[SERVED])
            assert seen == set(wanted)
        code, _, headers = await mesh.ask(headers={SELECT: "127.0.0.1"})
        assert (code, headers[SERVED] in addresses) == (200, True)


async def test_the_suite_can_reach_no_other_address() -> None:
    async with Mesh(decode=1, strangers=1, settings=SUITE) as mesh:
        for wanted in (mesh.strangers[0].address, mesh.prefill[0].address, "256.256.256.256"):
            code, text, _ = await mesh.ask(headers={SELECT: wanted})
            assert (code, '"code":"no_subset_worker"' in text) == (503, True)
        assert not mesh.strangers[0].received


async def test_the_suites_header_and_the_gateways_hint_hold_both() -> None:
    mesh = Mesh(decode=3, settings=SUITE)
    one, two, three = (worker.address for worker in mesh.decode)
    mesh.subset = [one, two]
    async with mesh:
        for _ in range(3):
            assert (await mesh.ask(headers={SELECT: f"{two},{three}"}))[2][HEADER] == two
        assert (await mesh.ask(headers={SELECT: three}))[0] == 503


async def test_a_gateway_that_does_not_say_who_served_is_told_so() -> None:
    async with Mesh("header", decode=1, settings=SUITE) as mesh:
        _, _, headers = await mesh.ask("/tokenize", headers={SELECT: mesh.decode[0].address})
        assert headers[SERVED].startswith("fail: ")


async def test_without_the_setting_the_suites_header_is_one_like_any_other() -> None:
    async with Mesh(decode=2) as mesh:
        seen = set()
        for _ in range(6):
            _, _, headers = await mesh.ask(headers={SELECT: mesh.decode[0].address})
            assert SERVED not in headers
            assert SELECTED not in headers
            seen.add(headers[HEADER])
        assert len(seen) == 2
