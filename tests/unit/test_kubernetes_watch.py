"""List and watch against a server that keeps history like the real one and fails on command: what is known is true or stays."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from extproc.discovery.guarded import Guarded, Networks
from extproc.discovery.kubernetes import api as api_module
from extproc.discovery.kubernetes import reflector
from extproc.discovery.kubernetes.access import Access, find, from_kubeconfig
from extproc.discovery.kubernetes.settings import KubernetesWorkers, PodWorkers, PoolWorkers, ServiceWorkers
from extproc.discovery.kubernetes.sources import sources_of
from extproc.discovery.source import SourceError
from extproc.routing.endpoint_spec import EndpointSet
from tests.certificates import Authority, Pair
from tests.kube_api.follower import Follower, discovery, until
from tests.kube_api.objects import endpoint, old_pool, pod, pool, readiness, slice_of, terminating
from tests.kube_api.server import KubeApi

BOTH_GONE: Any = pytest.mark.parametrize("gone_as", ["status", "event"])


def following(
    server: KubeApi, settings: KubernetesWorkers | None = None, access: Access | None = None
) -> AbstractAsyncContextManager[Follower]:
    return discovery(
        settings or KubernetesWorkers(pods=[PodWorkers(selector="app=vllm")], max_backoff_s=0.5),
        access or Access(server=server.url, namespace="default"),
    )


@pytest.fixture
async def server() -> AsyncIterator[KubeApi]:
    async with KubeApi() as running:
        yield running


# --- list and watch -------------------------------------------------------------------------------------------------------


async def test_pods_come_change_and_go(server: KubeApi) -> None:
    server.put("pods", pod("a", "10.0.0.1", role="prefill"))
    server.put("pods", pod("other-namespace", "10.0.0.9", namespace="elsewhere"))
    server.put("pods", pod("other-label", "10.0.0.8", labels={"app": "web"}))
    async with following(server) as follower:
        await follower.until("10.0.0.1")
        server.put("pods", pod("b", "10.0.0.2", role="decode", ready=False))
        server.put("pods", pod("c", "10.0.0.3", role="both"))
        await follower.until("10.0.0.1", "10.0.0.3")
        server.edit("pods", "b", readiness(True))
        await follower.until("10.0.0.1", "10.0.0.2", "10.0.0.3")
        now = follower.discovery.current
        assert [len(each) for each in (now.prefill, now.decode, now.both)] == [1, 1, 1]
        server.edit("pods", "a", terminating)
        await follower.until("10.0.0.2", "10.0.0.3")
        server.delete("pods", "a")
        server.edit("pods", "b", lambda found: found["metadata"]["labels"].update(app="gone"))
        await follower.until("10.0.0.3")
        server.edit("pods", "c", lambda found: found["status"].update(phase="Failed"))
        await follower.until()
        assert server.count("list") == server.count("watch") == 1, "one list, one watch, whatever happens"
        assert follower.error is None


async def test_a_request_says_what_is_wanted_and_no_more(server: KubeApi) -> None:
    server.put("pods", pod("a", "10.0.0.1"))
    async with following(server) as follower:
        await follower.until("10.0.0.1")
        await until(lambda: server.watching == 1)
    listed, watched = server.asked
    assert listed.query == {"labelSelector": "app=vllm", "fieldSelector": "status.phase=Running", "limit": "100"}
    assert 180 <= int(watched.query.pop("timeoutSeconds")) <= 300
    assert watched.query == {
        "labelSelector": "app=vllm",
        "fieldSelector": "status.phase=Running",
        "watch": "1",
        "resourceVersion": "1001",
        "allowWatchBookmarks": "true",
    }


async def test_a_long_list_comes_in_pages(server: KubeApi) -> None:
    server.page = 3
    for index in range(1, 11):
        server.put("pods", pod(f"p{index}", f"10.0.0.{index}"))
    async with following(server) as follower:
        await follower.until(*[f"10.0.0.{index}" for index in range(1, 11)])
        assert [each.query.get("continue", "first")[0] for each in server.asked if each.verb == "list"] == ["f", "3", "6", "9"]


async def test_pages_that_expire_are_listed_again_and_at_last_whole(server: KubeApi) -> None:
    for index in range(1, 6):
        server.put("pods", pod(f"p{index}", f"10.0.0.{index}"))
    server.page, server.expire_continue = 2, 2
    async with following(server) as follower:
        await follower.until(*[f"10.0.0.{index}" for index in range(1, 6)])
        assert server.count("list") == 2 + 2 + 3, "twice the second page was gone"
        assert follower.error is None
    server.asked.clear()
    server.page = None
    server.expire_continue = 1_000
    for index in range(1, 300):
        server.put("pods", pod(f"q{index}", f"10.1.{index // 256}.{index % 256}"))
    async with following(server) as follower:
        await until(lambda: len(follower.addresses) == 304)
        assert [each.query.get("limit") for each in server.asked if each.verb == "list"] == ["100"] * 6 + [None]


async def test_a_watch_that_ends_goes_on_where_it_was_and_a_bookmark_keeps_that_young(server: KubeApi) -> None:
    server.window = 5
    server.put("pods", pod("a", "10.0.0.1"))
    async with following(server) as follower:
        await follower.until("10.0.0.1")
        await until(lambda: server.watching == 1)
        for index in range(20):
            server.put("pods", pod("unrelated", "10.9.9.9", labels={"app": "web"}, restarts=index))
        server.bookmark()
        server.end_watches()
        await until(lambda: server.count("watch") == 2)
        server.put("pods", pod("b", "10.0.0.2"))
        await follower.until("10.0.0.1", "10.0.0.2")
        assert server.count("list") == 1, "without the bookmark its version would have been too old"
        assert server.asked[-1].query["resourceVersion"] == str(1021)


@BOTH_GONE
async def test_history_that_is_gone_means_another_list_and_nothing_is_lost_meanwhile(server: KubeApi, gone_as: Any) -> None:
    server.gone_as = gone_as
    server.put("pods", pod("a", "10.0.0.1"))
    server.put("pods", pod("b", "10.0.0.2"))
    async with following(server) as follower:
        await follower.until("10.0.0.1", "10.0.0.2")
        await until(lambda: server.watching == 1)
        await server.stop()
        server.put("pods", pod("c", "10.0.0.3"))
        server.delete("pods", "a")
        server.forget_history()
        await server.start()
        await follower.until("10.0.0.2", "10.0.0.3")
        assert server.count("list") == 2
        await until(lambda: follower.error is None)
        await until(lambda: server.watching == 1)
        assert server.count("watch") == 3, "the one that is told so is not tried again"
    assert {frozenset(spec.address for spec in each.decode) for each in follower.sets} == {
        frozenset({"10.0.0.1:8000", "10.0.0.2:8000"}),
        frozenset({"10.0.0.2:8000", "10.0.0.3:8000"}),
    }, "at no time was there another set"


async def test_a_server_that_always_says_gone_is_not_asked_all_the_time(
    server: KubeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[int] = []

    def backoff(_: Any, failures: int) -> float:
        pauses.append(failures)
        return 0.001

    monkeypatch.setattr(reflector.Pace, "backoff_s", backoff)
    server.put("pods", pod("a", "10.0.0.1"))
    server.fail(410, times=1_000_000, verb="watch")
    async with following(server) as follower:
        await until(lambda: server.count("watch") >= 6)
        assert follower.addresses == {"10.0.0.1:8000"}
    assert pauses[:4] == [2, 3, 4, 5], "only the first list again comes at once"


async def test_an_error_event_of_another_kind_is_tried_again_and_then_listed_again(server: KubeApi) -> None:
    server.put("pods", pod("a", "10.0.0.1"))
    async with following(server) as follower:
        await follower.until("10.0.0.1")
        for round_ in range(1, 4):
            await until(lambda: server.watching == 1)
            server.error_event(500, "InternalError")
            await until(lambda count=round_: server.count("watch") == count + 1)  # type: ignore[misc]
        await until(lambda: server.watching == 1)
        server.put("pods", pod("b", "10.0.0.2"))
        await follower.until("10.0.0.1", "10.0.0.2")
        assert server.count("list") == 2, "the third in a row makes it list again"
        await until(lambda: follower.error is None)


# --- connections ----------------------------------------------------------------------------------------------------------


async def test_a_connection_that_breaks_in_the_middle_of_an_event_loses_none(server: KubeApi) -> None:
    server.put("pods", pod("a", "10.0.0.1"))
    async with following(server) as follower:
        await follower.until("10.0.0.1")
        await until(lambda: server.watching == 1)
        server.send(b'{"type":"ADDED","object":{"metadata":{"name":"half"')
        await asyncio.sleep(0)
        added = server.put("pods", pod("b", "10.0.0.2"))
        server._watchers.copy().pop().events.put_nowait(None)
        server.disconnect()
        await follower.until("10.0.0.1", "10.0.0.2")
        assert server.count("list") == 1
        assert added["metadata"]["resourceVersion"] == "1002"


async def test_an_event_in_many_pieces_and_many_events_in_one(server: KubeApi) -> None:
    async with following(server) as follower:
        await until(lambda: server.watching == 1)
        lines = b"".join(
            json.dumps({"type": "ADDED", "object": pod(f"p{index}", f"10.0.0.{index}")}).encode() + b"\n" for index in (1, 2, 3)
        )
        for piece in (lines[:1], lines[1:700], lines[700:-1], lines[-1:]):
            server.send(piece)
        await follower.until("10.0.0.1", "10.0.0.2", "10.0.0.3")


async def test_the_server_away_empties_nothing_is_said_and_is_over_when_it_is_back(server: KubeApi) -> None:
    server.put("pods", pod("a", "10.0.0.1"))
    async with following(server) as follower:
        await follower.until("10.0.0.1")
        assert follower.discovery.failing_s("kubernetes") == 0
        await server.stop()
        await until(lambda: follower.error is not None)
        assert "pods default/app=vllm: watch of pods in namespace default at http://127.0.0.1" in str(follower.error)
        assert follower.discovery.failing_s("kubernetes") > 0
        assert follower.addresses == {"10.0.0.1:8000"}
        assert ("watch", "unreachable") in follower.requests
        server.put("pods", pod("b", "10.0.0.2"))
        await server.start()
        await follower.until("10.0.0.1", "10.0.0.2")
        await until(lambda: follower.error is None)
        assert follower.discovery.failing_s("kubernetes") == 0
        assert server.count("list") == 1


async def test_a_server_that_is_not_there_at_the_start_is_found_later() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    server = KubeApi(port=port)
    server.put("pods", pod("a", "10.0.0.1"))
    async with following(server) as follower:
        await until(lambda: follower.error is not None)
        await server.start()
        await follower.until("10.0.0.1")
        await server.stop()


async def test_a_server_that_takes_the_connection_and_says_nothing_is_given_up(server: KubeApi) -> None:
    server.put("pods", pod("a", "10.0.0.1"))
    server.gate = asyncio.Event()
    settings = KubernetesWorkers(pods=[PodWorkers(selector="app=vllm")], max_backoff_s=0.5, request_timeout_s=1)
    async with following(server, settings) as follower:
        await until(lambda: follower.error is not None)
        assert ("list", "unreachable") in follower.requests
        server.gate.set()
        await follower.until("10.0.0.1")
        server.gate.clear()
        server.end_watches()
        await until(lambda: ("watch", "unreachable") in follower.requests)
        server.gate.set()
        server.put("pods", pod("b", "10.0.0.2"))
        await follower.until("10.0.0.1", "10.0.0.2")


async def test_a_watch_whose_server_is_silently_gone_ends(server: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "_CONNECT_S", 0.1)
    monkeypatch.setattr(reflector.Pace, "watch_for_s", lambda _: 1)
    server.watch_s = 3600.0  # it never ends a watch by itself
    server.put("pods", pod("a", "10.0.0.1"))
    async with following(server) as follower:
        await follower.until("10.0.0.1")
        await until(lambda: server.count("watch") >= 2)
        assert ("watch", "unreachable") in follower.requests
        assert follower.addresses == {"10.0.0.1:8000"}


async def test_a_server_that_hangs_up_at_once_is_left_in_peace(server: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[int] = []

    def backoff(_: Any, failures: int) -> float:
        pauses.append(failures)
        return 0.001

    monkeypatch.setattr(reflector.Pace, "backoff_s", backoff)
    server.watch_s = 0.0
    async with following(server):
        await until(lambda: len(pauses) >= 4)
    assert pauses[:4] == [1, 2, 3, 4]


# --- refusals -------------------------------------------------------------------------------------------------------------


async def test_a_server_that_asks_for_time_gets_it(server: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    real = asyncio.sleep

    async def sleep(delay: float) -> None:
        waits.append(delay)
        await real(0)

    monkeypatch.setattr(reflector.asyncio, "sleep", sleep)
    server.put("pods", pod("a", "10.0.0.1"))
    server.fail(429, headers={"retry-after": "7"})
    server.fail(503, headers={"retry-after": "100000"})
    server.fail(500, headers={"retry-after": "Fri, 31 Dec 2027 23:59:59 GMT"})
    async with following(server) as follower:
        await follower.until("10.0.0.1")
        await until(lambda: server.watching == 1)
    pauses = [each for each in waits if each not in (0.01, 0.05)]
    assert pauses[:2] == [7.0, 60.0], "no server may ask for more than a minute"
    assert 0.25 <= pauses[2] <= 0.5
    assert follower.requests[:4] == [("list", "throttled"), ("list", "error"), ("list", "error"), ("list", "ok")]


def test_pauses_grow_to_a_bound_and_are_not_the_same_for_all() -> None:
    pace = reflector.Pace(watch_s=240, max_backoff_s=30)
    for failures, most in ((1, 0.5), (2, 1.0), (5, 8.0), (7, 30.0), (10_000, 30.0)):
        found = {pace.backoff_s(failures) for _ in range(50)}
        assert len(found) > 40
        assert all(most / 2 <= each <= most for each in found)
    assert {180 <= pace.watch_for_s() <= 300 for _ in range(50)} == {True}


async def test_rights_that_are_missing_are_named_and_noticed_when_they_come(server: KubeApi) -> None:
    server.put("pods", pod("a", "10.0.0.1"))
    server.denied = {"pods"}
    async with following(server) as follower:
        await until(lambda: follower.error is not None)
        assert follower.error is not None
        assert "list of pods in namespace default: 403: RBAC must allow the verbs list and watch on pods" in follower.error
        assert "cannot list resource" in follower.error
        server.denied = {"watch pods"}
        await follower.until("10.0.0.1")
        await until(lambda: "watch of pods in namespace default: 403" in str(follower.error))
        server.denied = set()
        await until(lambda: follower.error is None)


async def test_a_token_is_read_again_for_every_request(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("one\n")
    async with KubeApi(tokens={"one"}) as server:
        server.put("pods", pod("a", "10.0.0.1"))
        async with following(server, access=Access(server=server.url, namespace="default", token_file=token)) as follower:
            await follower.until("10.0.0.1")
            await until(lambda: server.watching == 1)
            server.tokens = {"two"}
            server.end_watches()
            await until(lambda: "401: the API server does not know the token" in str(follower.error))
            assert follower.addresses == {"10.0.0.1:8000"}
            token.write_text("two\n")
            await until(lambda: follower.error is None)
            token.unlink()
            server.end_watches()
            await until(lambda: "token" in str(follower.error) and "No such file" in str(follower.error))
            assert follower.addresses == {"10.0.0.1:8000"}
            assert "one" not in str(follower.error)
            token.write_text("two\n")
            await until(lambda: follower.error is None)
        assert {each.token for each in server.asked} == {"one", "two"}


# --- hostile and huge -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b'{"items":3,"metadata":{}}', b'{"metadata":{"resourceVersion":[]}}', b"\xff" * 99]
)
async def test_a_list_that_is_none_changes_nothing(server: KubeApi, raw: bytes) -> None:
    server.put("pods", pod("a", "10.0.0.1"))
    async with following(server) as follower:
        await follower.until("10.0.0.1")
        await until(lambda: server.watching == 1)
        server.garbage = raw
        server.forget_history()
        server.error_event(410, "Expired")
        await until(lambda: "a list of pods in namespace default" in str(follower.error))
        assert follower.addresses == {"10.0.0.1:8000"}
        await until(lambda: follower.error is None)


async def test_one_object_that_is_not_what_it_should_be_hides_no_other(server: KubeApi) -> None:
    broken = pod("broken", "10.0.0.7")
    broken["spec"]["containers"] = "none"
    server.put("pods", broken)
    server.put("pods", pod("a", "10.0.0.1"))
    async with following(server) as follower:
        await follower.until("10.0.0.1")
        await until(lambda: server.watching == 1)
        server.edit("pods", "broken", lambda found: found["metadata"].update(generation=2))
        for line in (b'{"type":"DELETED","object":{}}\n', b'{"type":"WHATEVER","object":null}\n', b"\n"):
            server.send(line)
        server.put("pods", pod("b", "10.0.0.2"))
        await follower.until("10.0.0.1", "10.0.0.2")
        assert server.count("watch") == 1
        assert follower.requests.count(("object", "unreadable")) == 3


async def test_a_line_that_is_no_event_is_begun_again_after(server: KubeApi) -> None:
    server.put("pods", pod("a", "10.0.0.1"))
    async with following(server) as follower:
        await follower.until("10.0.0.1")
        await until(lambda: server.watching == 1)
        server.send(b"<html>502 Bad Gateway</html>\n")
        await until(lambda: server.count("watch") == 2 and server.watching == 1)
        server.put("pods", pod("b", "10.0.0.2"))
        await follower.until("10.0.0.1", "10.0.0.2")


async def test_an_event_without_end_is_cut_off(server: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "MAX_LINE_BYTES", 100_000)
    server.put("pods", pod("a", "10.0.0.1"))
    async with following(server) as follower:
        await follower.until("10.0.0.1")
        await until(lambda: server.watching == 1)
        server.send(b"x" * 200_000)
        await until(lambda: ("watch", "too_large") in follower.requests)
        assert follower.addresses == {"10.0.0.1:8000"}
        await until(lambda: server.count("list") == 2 and follower.error is None)


async def test_pages_that_are_too_large_are_asked_for_smaller_and_an_object_that_is_too_large_is_refused(
    server: KubeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "MAX_PAGE_BYTES", 60_000)
    for index in range(1, 41):
        server.put("pods", pod(f"p{index}", f"10.0.0.{index}", annotations={"padding": "x" * 5_000}))
    async with following(server) as follower:
        await until(lambda: len(follower.addresses) == 40)
        limits = [each.query["limit"] for each in server.asked if each.verb == "list"]
        assert limits[:3] == ["100", "12", "1"]
        assert set(limits[3:]) == {"1"}
        server.put("pods", pod("huge", "10.0.0.99", annotations={"padding": "x" * 100_000}))
        server.forget_history()
        server.error_event(410, "Expired")
        await until(lambda: "is over 60000 bytes" in str(follower.error))
        assert len(follower.addresses) in (40, 41)
        server.delete("pods", "huge")
        await until(lambda: follower.error is None and len(follower.addresses) == 40)


async def test_a_selector_that_matches_a_whole_cluster_is_refused(server: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector, "MAX_OBJECTS", 5)
    for index in range(1, 8):
        server.put("pods", pod(f"p{index}", f"10.0.0.{index}"))
    async with following(server) as follower:
        await until(lambda: "more than 5 pods in namespace default match" in str(follower.error))
        assert follower.addresses == set()


async def test_pages_without_end_are_refused(server: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector, "MAX_OBJECTS", 50)
    server.put("pods", pod("a", "10.0.0.1"))
    server.endless = True
    async with following(server) as follower:
        await until(lambda: "more than 50 pods in namespace default match" in str(follower.error))


# --- InferencePool and Service --------------------------------------------------------------------------------------------


async def test_a_pool_names_pods_and_ports_and_may_change_both(server: KubeApi) -> None:
    server.put("pods", pod("a", "10.0.0.1", role="prefill"))
    server.put("pods", pod("b", "10.0.0.2", labels={"app": "new"}))
    server.put("inferencepools", pool("p", {"app": "vllm"}, 8000, 8001))
    server.put("inferencepools", pool("q", {"app": "other"}, 1))
    async with following(server, KubernetesWorkers(inference_pools=[PoolWorkers(name="p")], max_backoff_s=0.5)) as follower:
        await until(lambda: follower.addresses == {"10.0.0.1:8000", "10.0.0.1:8001"})
        assert "nothing" not in str(follower.outcomes), "no failure on the way"
        assert "failed" not in follower.outcomes
        server.put("inferencepools", pool("p", {"app": "vllm"}, 8000))
        await follower.until("10.0.0.1")
        server.put("inferencepools", pool("p", {"app": "new"}, 8000))
        await follower.until("10.0.0.2")
        await until(lambda: server.watching == 2)
        server.put("pods", pod("c", "10.0.0.3", labels={"app": "new"}))
        await follower.until("10.0.0.2", "10.0.0.3")
        assert [each.query.get("fieldSelector") for each in server.asked if each.resource == "inferencepools"] == [
            "metadata.name=p"
        ] * 2
        assert all(each.decode or each.prefill for each in follower.sets), "never an empty set while it changed"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda server: server.delete("inferencepools", "p"), "there is no such pool"),
        (lambda server: server.put("inferencepools", pool("p", {}, 8000)), "matches every pod"),
        (lambda server: server.put("inferencepools", pool("p", {"app": "vllm"})), "names no target port"),
    ],
    ids=["deleted", "no selector", "no port"],
)
async def test_a_pool_that_is_gone_or_useless_keeps_what_it_named_and_its_pods_are_followed(
    server: KubeApi, change: Callable[[KubeApi], None], why: str
) -> None:
    server.put("pods", pod("a", "10.0.0.1"))
    server.put("inferencepools", pool("p", {"app": "vllm"}, 8000))
    async with following(server, KubernetesWorkers(inference_pools=[PoolWorkers(name="p")])) as follower:
        await follower.until("10.0.0.1")
        await until(lambda: server.watching == 2)
        change(server)
        await until(lambda: why in str(follower.error))
        server.put("pods", pod("b", "10.0.0.2"))
        await follower.until("10.0.0.1", "10.0.0.2")
        assert why in str(follower.error)
        server.put("inferencepools", pool("p", {"app": "vllm"}, 8000))
        await until(lambda: follower.error is None)


async def test_a_pool_that_may_not_be_read_or_whose_kind_is_unknown(server: KubeApi) -> None:
    server.denied = {"inferencepools"}
    async with following(server, KubernetesWorkers(inference_pools=[PoolWorkers(name="p")], max_backoff_s=0.5)) as follower:
        await until(lambda: "RBAC must allow the verbs list and watch on inferencepools.inference" in str(follower.error))
        server.denied = set()
        server.fail(404, times=3)
        await until(lambda: "CustomResourceDefinition" in str(follower.error))
        server.put("pods", pod("a", "10.0.0.1"))
        server.put("inferencepools", pool("p", {"app": "vllm"}, 8000))
        await follower.until("10.0.0.1")


async def test_a_pool_of_the_older_version(server: KubeApi) -> None:
    server.put("pods", pod("a", "10.0.0.1"))
    server.put("inferencepools", old_pool("p", {"app": "vllm"}, 8000))
    async with following(server, KubernetesWorkers(inference_pools=[PoolWorkers(name="p", api="v1alpha2")])) as follower:
        await follower.until("10.0.0.1")


async def test_endpoints_of_services_in_two_roles(server: KubeApi) -> None:
    server.put("endpointslices", slice_of("prefill", "prefill-1", endpoint("10.0.0.1")))
    server.put("endpointslices", slice_of("decode", "decode-1", endpoint("10.0.0.2"), endpoint("10.0.0.3", ready=False)))
    settings = KubernetesWorkers(
        services=[ServiceWorkers(name="prefill", role="prefill"), ServiceWorkers(name="decode", role="decode")]
    )
    async with following(server, settings) as follower:
        await follower.until("10.0.0.1", "10.0.0.2")
        await until(lambda: server.watching == 2)
        server.put("endpointslices", slice_of("decode", "decode-2", endpoint("10.0.0.4"), endpoint("10.0.0.2")))
        await follower.until("10.0.0.1", "10.0.0.2", "10.0.0.4")
        server.delete("endpointslices", "decode-1")
        server.put("endpointslices", slice_of("decode", "decode-2", endpoint("10.0.0.4", ready=False, terminating=True)))
        await follower.until("10.0.0.1")
        server.put("endpointslices", slice_of("prefill", "prefill-2", endpoint("10.0.0.5"), ports={"a": 1, "b": 2}))
        await until(lambda: "which port?" in str(follower.error))
        assert "10.0.0.1:8000" in follower.addresses


async def test_one_entry_that_fails_does_not_hold_up_the_others(server: KubeApi) -> None:
    server.put("pods", pod("a", "10.0.0.1"))
    server.denied = {"endpointslices"}
    settings = KubernetesWorkers(
        pods=[PodWorkers(selector="app=vllm")], services=[ServiceWorkers(name="s", role="decode")], max_backoff_s=0.5
    )
    async with following(server, settings) as follower:
        await follower.until("10.0.0.1")
        await until(lambda: "endpointslices.discovery.k8s.io" in str(follower.error))
        server.put("pods", pod("b", "10.0.0.2"))
        await follower.until("10.0.0.1", "10.0.0.2")


async def test_what_a_failing_source_still_says_is_guarded_like_anything_that_it_says(server: KubeApi) -> None:
    server.put("pods", pod("a", "10.0.0.1"))
    server.put("pods", pod("b", "192.0.2.1"))
    server.denied = {"watch pods"}
    [source] = sources_of(
        KubernetesWorkers(pods=[PodWorkers(selector="app=vllm")]), Access(server=server.url, namespace="default")
    )
    guarded = Guarded(source, Networks(["10.0.0.0/8"]), lambda _kind, _address, _why: None)
    running = asyncio.create_task(guarded.run())
    said: list[EndpointSet | None] = []
    async with asyncio.timeout(20):
        while not said:
            try:
                assert [spec.address for spec in (await guarded.look()).decode] == ["10.0.0.1:8000"]
            except SourceError as error:
                said.append(error.said)
    running.cancel()
    assert said[0] is not None
    assert [spec.address for spec in said[0].decode] == ["10.0.0.1:8000"]


# --- credentials ----------------------------------------------------------------------------------------------------------


def server_tls(pair: Pair, clients: Path) -> ssl.SSLContext:
    """It asks for a client's certificate, and takes clients without."""
    context = pair.server(clients)
    context.verify_mode = ssl.CERT_OPTIONAL
    return context


def kubeconfig(folder: Path, server: str, cluster: dict[str, Any], user: dict[str, Any], **more: Any) -> Path:
    path = folder / "kubeconfig"
    tree = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "ns", **more}}],
        "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(json.dumps(tree))
    return path


def data(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


async def test_a_pod_finds_the_server_by_its_environment_and_trusts_no_other(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path, "ca"), Authority(tmp_path, "stranger")
    good = server_tls(authority.issue("api", ("127.0.0.1",)), authority.ca)
    false = server_tls(stranger.issue("false", ("127.0.0.1",)), stranger.ca)
    account = tmp_path / "serviceaccount"
    account.mkdir()
    (account / "token").write_text("mine")
    (account / "namespace").write_text("ns")
    (account / "ca.crt").write_bytes(authority.ca.read_bytes())
    async with KubeApi(tls=good, tokens={"mine"}) as server:
        server.put("pods", pod("a", "10.0.0.1", namespace="ns"))
        environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.port)}
        access = find(None, environment=environment, service_account=account)
        assert (access.server, access.namespace) == (server.url, "ns")
        async with following(server, access=access) as follower:
            await follower.until("10.0.0.1")
            await server.stop()
            server.tls = false
            asked = len(server.asked)
            await server.start()
            await until(lambda: "certificate verify failed" in str(follower.error))
            assert len(server.asked) == asked, "no token for a server that is not the one"
            assert follower.addresses == {"10.0.0.1:8000"}
            (account / "ca.crt").write_bytes(stranger.ca.read_bytes())  # the cluster's authority was exchanged
            await until(lambda: follower.error is None)


@pytest.mark.parametrize("inline", [False, True], ids=["files", "data"])
async def test_a_kubeconfig_with_a_client_certificate(tmp_path: Path, inline: bool) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("filter")
    async with KubeApi(tls=server_tls(authority.issue("api", ("kubernetes",)), authority.ca), tokens=set()) as server:
        server.put("pods", pod("a", "10.0.0.1", namespace="ns"))
        if inline:
            cluster = {"certificate-authority-data": data(authority.ca)}
            user = {"client-certificate-data": data(own.cert), "client-key-data": data(own.key)}
        else:
            cluster = {"certificate-authority": authority.ca.name}  # relative to the kubeconfig
            user = {"client-certificate": str(own.cert), "client-key": str(own.key)}
        path = kubeconfig(tmp_path, server.url, {**cluster, "tls-server-name": "kubernetes"}, user)
        async with following(server, access=from_kubeconfig(path)) as follower:
            await follower.until("10.0.0.1")
        assert {each.certificate for each in server.asked} == {"filter"}


async def test_a_kubeconfig_with_a_token_and_a_server_whose_certificate_is_not_looked_at(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with KubeApi(tls=server_tls(authority.issue("api", ("elsewhere",)), authority.ca), tokens={"t"}) as server:
        server.put("pods", pod("a", "10.0.0.1", namespace="ns"))
        path = kubeconfig(tmp_path, server.url, {"insecure-skip-tls-verify": True}, {"token": "t"})
        access = find(None, environment={"KUBECONFIG": str(path)})
        assert "t" not in repr(access).replace("Access", "").replace("http", "")
        async with following(server, access=access) as follower:
            await follower.until("10.0.0.1")


@pytest.mark.parametrize(
    ("cluster", "user", "why"),
    [
        ({}, {"exec": {"command": "aws"}}, "`exec` is not supported"),
        ({"proxy-url": "http://p"}, {}, "`proxy-url` is not supported"),
        ({}, {"client-certificate": "a"}, "client-certificate and client-key go together"),
        ({}, {"client-certificate-data": "%%%", "client-key-data": "eA=="}, "`client-certificate-data` is not base64"),
        ({"server": "ftp://x"}, {}, "`server` is not http"),
        ({"server": "http://x:1"}, {"token": "swordfish"}, "a token over http://"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_says_why(tmp_path: Path, cluster: Any, user: Any, why: str) -> None:
    with pytest.raises(SourceError) as caught:
        from_kubeconfig(kubeconfig(tmp_path, "https://x:6443", cluster, user))
    assert why in str(caught.value)
    assert "swordfish" not in str(caught.value)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="this is no pod"):
        find(None, environment={})
    with pytest.raises(SourceError, match="No such file"):
        find(str(tmp_path / "nothing"))
    with pytest.raises(SourceError, match="automountServiceAccountToken"):
        find(None, environment={"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, service_account=tmp_path)
    path = kubeconfig(tmp_path, "https://x:6443", {}, {})
    with pytest.raises(SourceError, match="`contexts` has no 'other'"):
        find(str(path), "other")
    path.write_text("{ swordfish: [")
    with pytest.raises(SourceError, match="not a kubeconfig") as caught:
        find(str(path))
    assert "swordfish" not in str(caught.value)
