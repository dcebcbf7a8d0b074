"""The live page in a real browser: it shows what the filter knows, on every screen, and asks nobody else for anything."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.job import Mode
from tests.page.world import World

QUANTILES = {"p50_s": 0.312, "p90_s": 0.68, "p99_s": 1.4, "samples": 812}


def some_times() -> dict[str, Any]:
    itl = {"p50_s": 0.0213, "p90_s": 0.03, "p99_s": 0.06, "samples": 9_000}
    together = {"source": "stream watch", "answers": 812, "ttft": QUANTILES, "itl": itl}
    return {
        "window_s": 60.0,
        **together,
        "by": [{**together, "model": "llama-3", "policy": "interactive", "mode": "disaggregate"}],
    }


def a_world(prefill: int = 2, decode: int = 3) -> World:
    world = World(prefill, decode, times=some_times())
    for endpoint in world.pool.endpoints:
        world.report(endpoint, kv_usage=0.5)
    return world


async def no_fault(visit: Any) -> None:
    assert visit.said == [], "the console is silent"
    assert {url.split("/")[2] for url in visit.asked} == {visit.address.split("/")[2]}, "no request leaves the host"


async def test_the_pool_is_drawn_prefill_left_decode_right_with_load_kv_and_handoffs(look: Any) -> None:
    world = a_world()
    async with world.served() as address, look(address) as visit:
        world.prompt(mode=Mode.DISAGGREGATE)
        await visit.until("document.querySelectorAll('.flow').length === 1")
        names = await visit.page.locator("#cells-prefill .name").all_inner_texts()
        assert names == ["10.0.0.1:8100", "10.0.0.2:8100"]
        assert await visit.page.locator("#cells-decode .cell").count() == 3
        left, right = [await visit.page.locator(f"#cells-{role}").bounding_box() for role in ("prefill", "decode")]
        assert left["x"] + left["width"] < right["x"]
        flow = await visit.page.locator(".flow").bounding_box()
        assert left["x"] + left["width"] <= flow["x"] + 8, "but for the width of the line"
        assert flow["x"] + flow["width"] <= right["x"] + 8
        assert "1 handoff in" in await visit.text("#flow-sum")
        busy = next(each for each in world.pool.endpoints if each.decode.requests)
        cell = visit.page.locator("#cells-decode .cell", has_text=busy.address)
        assert "1 request" in await cell.inner_text()
        assert "50 %" in await cell.inner_text()
        kv, bar = await cell.locator(".bar.kv i").bounding_box(), await cell.locator(".bar.kv").bounding_box()
        assert kv["width"] / bar["width"] == pytest.approx(0.5, abs=0.02)
        assert await visit.text("#state") == "Ready"
        await no_fault(visit)


async def test_the_figures_are_those_of_the_document_with_their_slo(look: Any) -> None:
    world = a_world()
    async with world.served() as address, look(address) as visit:
        await visit.until("document.querySelector('#ttft .slo').getAttribute('d') !== ''")
        ttft, itl = await visit.text("#ttft"), await visit.text("#itl")
        assert "312 ms" in ttft and "680 ms" in ttft and "1.40 s" in ttft and "SLO 1.00 s (interactive)" in ttft
        assert "21.3 ms" in itl and "60.0 ms" in itl and "SLO 45.0 ms" in itl
        assert await visit.page.locator("#ttft .more .bad").inner_text() == "p99 1.40 s", "over its SLO"
        late = await visit.page.locator("#by td.late").all_inner_texts()
        assert late == ["1.40 s", "60.0 ms"]
        await no_fault(visit)


async def test_a_decision_opens_with_every_candidate_its_terms_and_why_it_lost(look: Any) -> None:
    world = a_world(3, 3)
    world.prompt(tokens=6_000, request_id="look-at-me")
    (decision,) = world.live.document().decisions
    assert len(decision.candidates) > 2
    async with world.served() as address, look(address) as visit:
        row = visit.page.locator("button.decision")
        await row.click()
        detail = visit.page.locator("#decision")
        assert "look-at-me" in await detail.inner_text()
        rows = await detail.locator("tbody tr").all()
        assert len(rows) == len(decision.candidates)
        heads = [text.strip() for text in await detail.locator("th").all_inner_texts()]
        for shown, candidate in zip(rows, decision.candidates, strict=True):
            cells = await shown.locator("td").all_inner_texts()
            assert cells[:2] == [candidate.prefill or "–", candidate.decode]
            assert cells[-1] == (candidate.why or "chosen")
            for name, value in candidate.terms_ms.items():
                if value >= 10:
                    assert cells[heads.index(name.replace("_", " "))] == f"{value + 1e-9:,.0f}"
        assert await row.get_attribute("aria-expanded") == "true"
        await visit.page.keyboard.press("Escape")
        assert await detail.is_hidden()
        await no_fault(visit)


async def test_an_open_decision_stays_while_others_come(look: Any) -> None:
    world = a_world()
    world.prompt(request_id="stay-here")
    async with world.served() as address, look(address) as visit:
        await visit.page.locator("button.decision").click()
        await visit.page.mouse.move(2, 2)
        for _ in range(40):
            world.prompt()
        await visit.until("document.querySelector('#flow-sum').textContent !== '0 handoffs in 10 s'")
        await asyncio.sleep(3)
        assert "stay-here" in await visit.text("#decision")


@pytest.mark.parametrize(("state", "word"), [("down", "down"), ("warming", "warming"), ("failing", "failing")])
async def test_a_worker_that_falls_ill_changes_its_look_and_says_so(look: Any, state: str, word: str) -> None:
    world = a_world()
    async with world.served() as address, look(address) as visit:
        cell = "#cells-decode .cell:first-child"
        await visit.until(f"document.querySelector('{cell} .state').textContent === 'live'")
        before = await visit.color(cell, "borderColor"), await visit.color(f"{cell} .state", "color")
        sick = world["10.0.1.1:8200"]
        if state == "down":
            world.pool.set_live(sick, False)
        elif state == "warming":
            world.pool.set_warming(sick, True)
        else:
            sick.decode.failures, sick.decode.blocked_until_s = 3, world.now_s() + 60
        await visit.until(f"document.querySelector('{cell} .state').textContent === '{word}'")
        after = await visit.color(cell, "borderColor"), await visit.color(f"{cell} .state", "color")
        assert before[0] != after[0] and before[1] != after[1]
        assert "1 not live" in await visit.text("#pool-sum")
        assert word in str(await visit.page.locator(cell).get_attribute("aria-label"))
        await no_fault(visit)


async def test_a_worker_that_leaves_the_pool_leaves_the_picture(look: Any) -> None:
    world = a_world(1, 2)
    async with world.served() as address, look(address) as visit:
        await visit.page.locator("#cells-decode .cell").nth(1).click()
        kept = EndpointSet(
            (world["10.0.0.1:8100"].spec,),
            (world["10.0.1.1:8200"].spec,),
        )
        world.pool.replace(kept)
        await visit.until("document.querySelectorAll('#cells-decode .cell').length === 1")
        assert "no longer in the pool" in await visit.text("#worker")
        await no_fault(visit)


async def test_200_workers_fit_on_a_screen_and_each_can_be_asked(look: Any) -> None:
    world = a_world(100, 100)
    for _ in range(60):
        world.prompt(mode=Mode.DISAGGREGATE)
    async with world.served() as address, look(address) as visit:
        await visit.until("document.querySelectorAll('.cell').length === 200")
        box = await visit.page.locator("#picture").bounding_box()
        assert box["height"] < 500
        boxes = await visit.page.evaluate(
            "[...document.querySelectorAll('.cell')].map(each => each.getBoundingClientRect()).map(r => [r.width, r.height])"
        )
        assert all(width >= 24 and height >= 24 for width, height in boxes), "large enough for a finger"
        assert await visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await visit.page.locator("#cells-decode .cell").nth(99).click()
        assert "10.0.1.100:8200" in await visit.text("#worker")
        await no_fault(visit)


@pytest.mark.parametrize("workers", [3, 20, 100])
async def test_on_a_phone_nothing_scrolls_sideways_and_everything_is_there(look: Any, workers: int) -> None:
    world = a_world(workers, workers)
    world.prompt(tokens=6_000)
    async with world.served() as address, look(address, width=360) as visit:
        await visit.until(f"document.querySelectorAll('.cell').length === {2 * workers}")
        await visit.page.locator("button.decision").click()
        await visit.page.locator("#cells-prefill .cell").first.click()
        assert await visit.page.evaluate("document.documentElement.scrollWidth") == 360
        wide = await visit.page.evaluate(
            "[...document.querySelectorAll('body *')].filter(each => each.closest('.scroll') === null"
            " && each.getBoundingClientRect().right > 361).map(each => each.tagName + '.' + each.className)"
        )
        assert wide == []
        await no_fault(visit)


async def test_dark_and_light_differ_and_both_can_be_read(look: Any) -> None:
    def brightness(color: str) -> float:
        red, green, blue = (float(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3])
        linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in (red, green, blue)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    grounds = []
    world = a_world()
    world.pool.set_live(world["10.0.1.1:8200"], False)
    async with world.served() as address:
        for dark in (False, True):
            async with look(address, dark=dark) as visit:
                panel = brightness(await visit.color(".panel", "backgroundColor"))
                grounds.append(panel)
                for selector in (
                    ".figure h2",
                    ".quiet",
                    "#title-prefill",
                    "#title-decode",
                    ".cell .state",
                    ".cell .name",
                    ".bars",
                ):
                    text = brightness(await visit.color(selector, "color"))
                    contrast = (max(text, panel) + 0.05) / (min(text, panel) + 0.05)
                    assert contrast >= 4.5, f"{selector} {'dark' if dark else 'light'}: {contrast:.1f}"
                await no_fault(visit)
    light, dark_ground = grounds
    assert light > 0.8 and dark_ground < 0.05


async def test_a_filter_that_goes_away_and_comes_back_is_said_loudly(look: Any) -> None:
    world = a_world()
    world.prompt(mode=Mode.DISAGGREGATE)
    async with world.served() as address, look(address) as visit:
        await visit.until("document.querySelector('.flow-move') !== null")
        await visit.page.route("**/live", lambda route: route.abort())
        await visit.until("document.body.classList.contains('stale')")
        assert await visit.text("#state") == "No answer"
        assert "has not answered for" in await visit.text("#notices")
        assert await visit.page.locator(".cell").count() == 5, "what was known is still there"
        assert float(await visit.color("main", "opacity")) < 1
        assert await visit.color(".flow-move", "animationPlayState") == "paused"
        await visit.page.unroute("**/live")
        await visit.until("!document.body.classList.contains('stale')")
        assert await visit.text("#state") == "Ready"


async def test_a_drain_and_a_broken_source_of_workers_are_said(look: Any) -> None:
    world = a_world()
    async with world.served() as address, look(address) as visit:
        world.state["draining"] = True
        world.state["discovery"][0]["error"] = "permission denied"
        await visit.until("document.querySelector('#state').textContent === 'Draining'")
        notices = await visit.text("#notices")
        assert "told to stop" in notices
        assert "/etc/baton/workers.yaml: permission denied" in notices
        assert "permission denied" in await visit.text("#facts")


async def test_an_empty_pool_says_what_to_do(look: Any) -> None:
    world = World(specs=EndpointSet())
    world.state["why"] = "a role has no live worker"
    async with world.served() as address, look(address) as visit:
        assert "workers.prefill" in await visit.text("#cells-prefill")
        assert "baton check" in await visit.text("#cells-decode")
        assert "curl http://127.0.0.1:8000/v1/completions" in await visit.text("#decision-list")
        assert "a role has no live worker" in await visit.text("#notices")
        await no_fault(visit)


async def test_text_from_workers_and_clients_is_never_markup(look: Any) -> None:
    nasty = "<img src=x onerror=alert(1)><b>bold</b>"
    world = World(
        specs=EndpointSet((EndpointSpec(address="10.0.0.1:1", labels={nasty: nasty}),), (EndpointSpec(address="10.0.1.1:1"),))
    )
    world["10.0.0.1:1"].models = {nasty: b"{}"}
    world.prompt(request_id=nasty, policy=nasty, mode=Mode.DISAGGREGATE)
    world.state["discovery"][0]["error"] = nasty
    async with world.served() as address, look(address) as visit:
        await visit.page.locator("button.decision").click()
        await visit.page.locator("#cells-prefill .cell").click()
        for selector in ("#worker", "#decision", "#notices", "#facts", "#decision-list"):
            assert nasty in await visit.text(selector)
        assert await visit.page.locator("img, main b:text('bold')").count() == 0
        await no_fault(visit)


async def test_everything_is_within_reach_of_the_keyboard(look: Any) -> None:
    world = a_world(1, 1)
    world.prompt()
    async with world.served() as address, look(address) as visit:
        await visit.until("document.querySelector('button.decision') !== null")
        reached = []
        for _ in range(6):
            await visit.page.keyboard.press("Tab")
            reached.append(
                await visit.page.evaluate("document.activeElement.id || document.activeElement.className.split(' ')[0]")
            )
            outline = await visit.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", f"{reached[-1]} shows that it has the focus"
        assert reached[:5] == ["skip", "hold", "cell", "cell", "decision"]
        await visit.page.locator("#cells-prefill .cell").focus()
        await visit.page.keyboard.press("Enter")
        assert "10.0.0.1:8100" in await visit.text("#worker")
        await asyncio.sleep(1.5)
        assert await visit.page.evaluate("document.activeElement.classList.contains('cell')"), "a new document keeps the focus"


async def test_a_hundred_workers_are_one_stop_of_the_tab_key_and_arrows_walk_among_them(look: Any) -> None:
    async with a_world(100, 100).served() as address, look(address) as visit:
        await visit.until("document.querySelectorAll('.cell').length === 200")
        assert await visit.page.locator(".cell[tabindex='0']").count() == 2
        await visit.page.locator("#cells-decode .cell[tabindex='0']").focus()
        for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp", "End"):
            await visit.page.keyboard.press(key)
        await visit.page.keyboard.press("Enter")
        assert "10.0.1.100:8200" in await visit.text("#worker")
        assert await visit.page.locator(".cell[tabindex='0']").count() == 2
        await no_fault(visit)


async def test_whoever_wants_no_motion_gets_none(look: Any) -> None:
    world = a_world()
    world.prompt(mode=Mode.DISAGGREGATE)
    async with world.served() as address:
        for still in (False, True):
            async with look(address, still=still) as visit:
                await visit.until("document.querySelector('.flow-move') !== null")
                running = await visit.page.evaluate(
                    "document.getAnimations().filter(each => each.playState === 'running').length"
                )
                assert (running == 0) is still
                assert await visit.page.locator(".flow").count() > 0, "the lines themselves stay"


async def test_a_paused_page_asks_nothing_and_goes_on_when_told(look: Any) -> None:
    world = a_world()
    async with world.served() as address, look(address) as visit:
        await visit.page.locator("#hold").click()
        await asyncio.sleep(1.2)
        asked = len(visit.asked)
        await asyncio.sleep(5)
        assert len(visit.asked) == asked
        assert not await visit.page.evaluate("document.body.classList.contains('stale')")
        async with visit.page.expect_request("**/live"):
            await visit.page.locator("#hold").click()
