"""Blocks that a decode worker keeps: to whom they are given, and to whom never; and that no client sees a word of them."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from extproc import config
from extproc.handoff import Handoff, HandoffError
from extproc.handoff.nixl_turn import KeptBlocks, kept_after, release_of
from extproc.handoff.remote_hosts import RemoteHosts
from extproc.next_turn.answer import Events, Whole
from extproc.next_turn.outcomes import OUTCOMES
from extproc.next_turn.settings import NextTurn
from extproc.next_turn.store import NextTurns, Turn
from extproc.observe.instruments import Tally
from extproc.paths import Treatment
from extproc.routing.job import Mode, Offer
from extproc.routing.load import Load
from extproc.routing.pairs import Pairs
from extproc.routing.token_chain import Placed, TokenChain
from tests.unit.routing_world import World, pool_of

SIZE = 16
PROMPT, ANSWER, MORE = list(range(1000, 1200)), list(range(5000, 5100)), list(range(7000, 7040))


def params(tokens: int = 299, blocks: int | None = None, **more: Any) -> bytes:
    """As a decode worker's answer has them."""
    made = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(range(10, 10 + (blocks or -(-tokens // SIZE))))],
        "remote_engine_id": "engine-d0",
        "remote_request_id": "chatcmpl-1-abc",
        "remote_host": "10.0.0.7",
        "remote_port": 5640,
        "tp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": 12.5,
        "transfer_mode": "pull",
        "something_new": {"a": 1},
    }
    return json.dumps({**made, **more}).encode()


def kept(raw: bytes, decode: str = "d0") -> KeptBlocks:
    return KeptBlocks(raw, decode, RemoteHosts([]))


def chain(*parts: list[int], **more: Any) -> TokenChain:
    return TokenChain(array("I", [token for part in parts for token in part]), **more)


class Shelf:
    """A store, its clock, and what it gave back."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 100.0
        self.pool = pool_of(2, 2)
        self.back = Pairs(0.5)
        self.released: list[Handoff] = []
        self.later: list[Handoff] = []
        self.tally = Tally(CollectorRegistry(), "baton_next_turn", "", ("outcome",), known=[(each,) for each in OUTCOMES])
        for endpoint in self.pool.endpoints:
            endpoint.load = Load(block_tokens=SIZE)
        self.turns = NextTurns(
            NextTurn(enabled=True, **{"ttl_s": 60.0, "margin_s": 10.0, **settings}),
            self.pool,
            self.back,
            hosts=RemoteHosts([]),
            not_before=lambda: self.now_s - 0.2,
            count=self.tally,
            release=self.released.append,
            release_later=self.later.append,
            clock=lambda: self.now_s,
        )

    def keep(self, raw: bytes | None = None, ids: list[int] | None = None, decode: str = "d0", **more: Any) -> None:
        since_s = self.turns.since_s(more.pop("sent_s", self.now_s - 5))
        given = {"model": "m", "lora": None, "cache_salt": None, "since_s": since_s, **more}
        self.turns.keep(kept(raw or params(), decode), array("I", ids or PROMPT + ANSWER), len(PROMPT), **given)

    def find(self, *parts: list[int], model: str = "m", **more: Any) -> Turn | None:
        return self.turns.find(chain(*parts, **more), model)

    def take(self, turn: Turn, prefill: str = "p0") -> Any:
        endpoint = self.pool.get(prefill)
        assert endpoint is not None
        found = self.turns.take(turn, endpoint, None)
        return None if found is None else json.loads(found)

    @property
    def counts(self) -> dict[str, float]:
        return {labels[0]: value for labels, value in self.tally._values.items() if value}


# -- to whom they are given ------------------------------------------------------------------------------------------------


def test_a_prompt_that_goes_on_behind_exactly_their_tokens_gets_them_once() -> None:
    shelf = Shelf()
    shelf.keep()
    turn = shelf.find(PROMPT, ANSWER, MORE)
    assert turn is not None and turn.offer == Offer("d0", 299), "all but the last token, which may not be written yet"
    given = shelf.take(turn)
    assert (given["do_remote_decode"], given["do_remote_prefill"]) == (True, False)
    assert given["remote_num_tokens"] == 299 and given["remote_block_ids"] == [list(range(10, 29))]
    assert given["something_new"] == {"a": 1} and given["remote_blocks_expiry_time"] == 12.5, "what we do not know goes on"
    assert shelf.take(turn) is None and shelf.find(PROMPT, ANSWER, MORE) is None and len(shelf.turns) == 0
    assert shelf.counts == {"kept": 1} and shelf.turns.bytes == 0


@pytest.mark.parametrize("at", [0, 1, 15, 16, 63, 64, 191, 192, 199, 200, 255, 256, 297, 298])
def test_one_other_token_anywhere_and_it_gets_nothing(at: int) -> None:
    shelf = Shelf()
    shelf.keep()
    ids = PROMPT + ANSWER + MORE
    ids[at] += 1
    assert shelf.find(ids) is None
    assert shelf.counts == ({"kept": 1, "diverged": 1} if at >= 200 else {"kept": 1}), "counted where the answer was changed"


def test_the_last_token_of_an_answer_is_not_compared_because_it_is_not_read() -> None:
    shelf = Shelf()
    shelf.keep()
    assert shelf.find(PROMPT, ANSWER[:-1], MORE) is not None


def test_nothing_new_or_less_than_they_hold_is_no_continuation() -> None:
    shelf = Shelf()
    shelf.keep()
    assert shelf.find(PROMPT, ANSWER[:-1]) is None, "a prompt must have one token more than is read"
    assert shelf.find(PROMPT, ANSWER[:-30]) is None
    assert shelf.find(PROMPT) is None
    assert shelf.find(ANSWER, PROMPT, MORE) is None


@pytest.mark.parametrize(
    ("of_answer", "of_prompt"),
    [
        ({}, {"lora": "sql"}),
        ({"lora": "sql"}, {}),
        ({"lora": "sql"}, {"lora": "law"}),
        ({}, {"cache_salt": "mine"}),
        ({"cache_salt": "mine"}, {}),
        ({"cache_salt": "mine"}, {"cache_salt": "yours"}),
        ({}, {"model": "other"}),
        ({}, {"items": [Placed("image", 30, 10)]}),
        ({}, {"items": [Placed("image", 290, 20)]}),
    ],
)
def test_the_same_tokens_in_other_circumstances_are_another_prompt(of_answer: Any, of_prompt: Any) -> None:
    shelf = Shelf()
    shelf.keep(**of_answer)
    assert shelf.find(PROMPT, ANSWER, MORE, **of_prompt) is None
    same = {**of_answer, "items": [Placed("image", 310, 10)]}
    assert shelf.find(PROMPT, ANSWER, MORE, **same) is not None, "what comes behind them makes no difference"


def test_the_longest_of_several_turns_is_found() -> None:
    shelf = Shelf()
    shelf.keep()
    shelf.keep(params(399, remote_request_id="r2"), PROMPT + ANSWER + list(range(9000, 9100)), decode="d1")
    found = shelf.find(PROMPT, ANSWER, list(range(9000, 9100)), MORE)
    assert found is not None and found.offer == Offer("d1", 399)
    found = shelf.find(PROMPT, ANSWER, MORE)
    assert found is not None and found.offer == Offer("d0", 299)


# -- to whom not, any more -------------------------------------------------------------------------------------------------


def test_time_is_up_before_the_engine_says_so() -> None:
    shelf = Shelf()
    shelf.keep()
    turn = shelf.find(PROMPT, ANSWER, MORE)
    shelf.now_s += 49.7  # the answer was there 0.2 s before it was read, at the most
    assert turn is not None and shelf.find(PROMPT, ANSWER, MORE) is turn
    shelf.now_s += 0.2
    assert shelf.take(turn) is None and shelf.find(PROMPT, ANSWER, MORE) is None
    assert shelf.counts == {"kept": 1, "expired": 1} and not shelf.released, "the engine has let go by itself"


def test_what_was_sent_late_is_not_younger_than_its_request() -> None:
    shelf = Shelf(ttl_s=11.0)
    shelf.keep(sent_s=shelf.now_s - 0.1)
    assert len(shelf.turns) == 1
    shelf.now_s += 0.95
    assert shelf.find(PROMPT, ANSWER, MORE) is None


def _dead(shelf: Shelf) -> None:
    endpoint = shelf.pool.get("d0")
    assert endpoint is not None
    shelf.pool.set_live(endpoint, False)


def _restarted(shelf: Shelf) -> None:
    shelf.back.forget("d0")


def _left(shelf: Shelf) -> None:
    endpoint = shelf.pool.get("d0")
    assert endpoint is not None
    endpoint.leaving = True


def _other_engine(shelf: Shelf) -> None:
    shelf.keep(params(remote_engine_id="engine-new", remote_request_id="r2"), [1] * 300)


@pytest.mark.parametrize("what", [_dead, _restarted, _left, _other_engine])
def test_a_worker_that_is_not_the_same_any_more(what: Any) -> None:
    shelf = Shelf()
    shelf.keep()
    turn = shelf.find(PROMPT, ANSWER, MORE)
    what(shelf)
    assert turn is not None and shelf.take(turn) is None
    assert shelf.find(PROMPT, ANSWER, MORE) is None
    assert shelf.counts["gone"] == 1 and not shelf.released


def test_an_answer_of_a_worker_that_went_meanwhile_is_not_kept() -> None:
    shelf = Shelf()
    _dead(shelf)
    shelf.keep()
    assert shelf.counts == {"gone": 1} and len(shelf.turns) == 0


def test_a_prompt_whose_tokens_are_not_known_gets_nothing() -> None:
    shelf = Shelf()
    assert shelf.turns.find(None, "m") is None and shelf.counts == {}, "nobody keeps anything: nothing was missed"
    shelf.keep()
    assert shelf.turns.find(None, "m") is None and shelf.counts == {"kept": 1, "prompt_unknown": 1}


@pytest.mark.parametrize("sizes", [(None, 16), (16, None), (16, 32), (32, 32)])
def test_blocks_of_an_unknown_or_another_size_are_not_read(sizes: tuple[int | None, int | None]) -> None:
    """32 and 32: so large blocks cannot be so many; they are not read but given back, or the last would stand for the first."""
    shelf = Shelf()
    for address, size in zip(("d0", "p0"), sizes, strict=True):
        endpoint = shelf.pool.get(address)
        assert endpoint is not None
        endpoint.load = Load(block_tokens=size)
    shelf.keep(params(299, blocks=9))
    turn = shelf.find(PROMPT, ANSWER, MORE)
    assert turn is not None and shelf.take(turn) is None
    assert shelf.counts == {"kept": 1, "unusable": 1} and len(shelf.released) == 1


def test_blocks_behind_the_tokens_are_cut_off() -> None:
    """vLLM 0.32 names all that it had allocated, and its prefill worker takes the last ones."""
    shelf = Shelf()
    shelf.keep(params(299, blocks=21))
    turn = shelf.find(PROMPT, ANSWER, MORE)
    assert turn is not None and shelf.take(turn)["remote_block_ids"] == [list(range(10, 29))]


def test_what_an_engine_counts_beyond_the_tokens_that_it_told_is_not_read() -> None:
    shelf = Shelf()
    shelf.keep(params(303, blocks=20))
    turn = shelf.find(PROMPT, ANSWER, MORE)
    assert turn is not None and shelf.take(turn)["remote_num_tokens"] == 299


def test_bounds_give_the_oldest_back() -> None:
    shelf = Shelf(max_conversations=2)
    for number in range(3):
        shelf.keep(params(remote_request_id=f"r{number}"), [number, *PROMPT[1:], *ANSWER])
    assert [each.request_id for each in shelf.released] == ["r0"] and len(shelf.turns) == 2
    assert shelf.find([0, *PROMPT[1:]], ANSWER, MORE) is None and shelf.find([2, *PROMPT[1:]], ANSWER, MORE) is not None
    small = Shelf(max_bytes=5000)
    for number in range(4):
        small.keep(params(remote_request_id=f"r{number}"), [number, *PROMPT[1:], *ANSWER])
    assert small.turns.bytes <= 5000 and small.counts == {"kept": 4, "evicted": 2}


def test_a_turn_that_is_not_used_is_given_back_in_a_while_and_only_once() -> None:
    shelf = Shelf()
    shelf.keep()
    turn = shelf.find(PROMPT, ANSWER, MORE)
    assert turn is not None
    shelf.turns.unused(turn, "went_back")
    shelf.turns.unused(turn, "went_back")
    assert shelf.counts == {"kept": 1, "went_back": 1} and len(shelf.later) == 1
    (handoff,) = shelf.later
    given = json.loads(handoff.params or b"")
    assert (given["do_remote_decode"], given["do_remote_prefill"]) == (False, True), "as who fetches them would say it"
    assert handoff.releasable and handoff.prefill == "d0"


def test_a_prefill_worker_that_fails_is_charged_for_it_and_a_refused_one_gives_back() -> None:
    shelf = Shelf()
    shelf.keep()
    turn = shelf.find(PROMPT, ANSWER, MORE)
    assert turn is not None
    shelf.turns.failed(turn, "p0", "failed")
    assert shelf.back.penalty_s("d0", "p0", shelf.now_s) > 0
    assert shelf.turns.offer(turn).not_for == {"p0"}
    shelf.now_s += 61
    assert not shelf.turns.offer(turn).not_for
    shelf.turns.failed(turn, "p0", "failed")
    shelf.now_s += 61
    assert shelf.turns.offer(turn).not_for == {"p0"}, "twice as long"
    assert not shelf.released, "it may be reading them"
    shelf.turns.failed(turn, "p1", "refused")
    assert len(shelf.released) == 1
    shelf.turns.went_well("d0", "p0", read=True)
    assert shelf.back.met("d0", "p0") and not shelf.turns.offer(turn).not_for


@pytest.mark.parametrize(
    "more",
    [
        {"remote_block_ids": [[1], [2]]},
        {"remote_block_ids": [1, 2]},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": []},
        {"remote_num_tokens": 0},
        {"remote_num_tokens": "299"},
        {"do_remote_decode": False},
        {"dcp_size": 2},
        {"transfer_mode": "push"},
        {"remote_host": "10.0.0.7\n"},
        {"remote_port": 0},
        {"remote_engine_id": None},
    ],
)
def test_params_that_no_prefill_worker_could_read_safely_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(HandoffError) as error:
        kept(params(**more))
    assert "299" not in str(error.value) and "engine-d0" not in str(error.value), "an error may be logged"


def test_blocks_that_cannot_be_read_can_still_be_given_back() -> None:
    several = params(remote_block_ids=[[1], [2]])
    found = release_of(several, "d0", RemoteHosts([]))
    assert found is not None and found.request_id == "chatcmpl-1-abc"
    given = json.loads(found.params or b"")
    assert given["do_remote_prefill"] is True and given["remote_block_ids"] == [[1], [2]]
    assert release_of(params(remote_host="elsewhere"), "10.0.0.7:8200", RemoteHosts(["worker"])) is None
    assert release_of(b'{"a": 1}', "d0", RemoteHosts([])) is None
    after = kept_after(b'{"kv_transfer_params": ' + several + b"}", "d0", RemoteHosts([]))
    assert after is not None and after.params == found.params
    for answer in (b'{"kv_transfer_params": null}', b"{}", b"no"):
        assert kept_after(answer, "d0", RemoteHosts([])) is None


def test_every_outcome_is_explained_where_people_look() -> None:
    page = (Path(__file__).parents[2] / "docs/routing.md").read_text()
    for outcome, meaning in OUTCOMES.items():
        assert f"| `{outcome}` | {meaning} |" in page


def test_blocks_elsewhere_than_the_configuration_allows_are_refused() -> None:
    with pytest.raises(HandoffError):
        KeptBlocks(params(), "10.0.0.8:8200", RemoteHosts(["worker"]))
    KeptBlocks(params(), "10.0.0.7:8200", RemoteHosts(["worker"]))


# -- what a client sees ----------------------------------------------------------------------------------------------------


def answered(treatment: Treatment, body: dict[str, Any], *, hide_ids: bool, pieces: int = 7) -> tuple[Whole, Any]:
    edit, raw = Whole(treatment, hide_ids=hide_ids), json.dumps(body).encode()
    out = [edit.feed(raw[at : at + pieces], last=False) for at in range(0, len(raw), pieces)]
    assert not any(out), "nothing goes on before the end"
    return edit, json.loads(edit.feed(b"", last=True))


CHAT: dict[str, Any] = {
    "id": "x",
    "choices": [{"index": 0, "message": {"content": "Hä \u2028?"}, "token_ids": [4, 5]}],
    "prompt_token_ids": [1, 2, 3],
    "kv_transfer_params": {"remote_block_ids": [[1]]},
    "usage": {"total_tokens": 5},
}


def test_a_chat_answer_goes_on_without_them_and_with_everything_else() -> None:
    edit, shown = answered(Treatment.CHAT, CHAT, hide_ids=True)
    assert edit.told is not None
    assert (edit.told.prompt_ids, edit.told.answer_ids) == (b"[1, 2, 3]", b"[4, 5]")
    assert json.loads(edit.told.params or b"") == {"remote_block_ids": [[1]]}
    choice = {**CHAT["choices"][0], "token_ids": None}
    assert shown == {**CHAT, "kv_transfer_params": None, "prompt_token_ids": None, "choices": [choice]}
    _, asked_for = answered(Treatment.CHAT, CHAT, hide_ids=False)
    assert asked_for == {**CHAT, "kv_transfer_params": None}


def test_a_completion_has_its_ids_in_the_choice() -> None:
    body = {"choices": [{"text": "a", "token_ids": [4], "prompt_token_ids": [1]}], "kv_transfer_params": {"a": 1}}
    edit, shown = answered(Treatment.COMPLETIONS, body, hide_ids=True)
    assert edit.told is not None and (edit.told.prompt_ids, edit.told.answer_ids) == (b"[1]", b"[4]")
    gone = {"text": "a", "token_ids": None, "prompt_token_ids": None}
    assert shown == {"choices": [gone], "kv_transfer_params": None}


@pytest.mark.parametrize("treatment", [Treatment.MESSAGES, Treatment.RESPONSES])
def test_the_other_apis_lose_the_params_too(treatment: Treatment) -> None:
    edit, shown = answered(treatment, {"content": [], "kv_transfer_params": {"a": 1}}, hide_ids=False)
    assert shown == {"content": [], "kv_transfer_params": None}
    assert edit.told is not None and edit.told.params == b'{"a": 1}'


@pytest.mark.parametrize("raw", [b"", b"[1]", b"{", b'{"choices": 5}', b"\xff\xfe", b'{"choices": [1]}'])
def test_an_answer_that_is_no_such_object_goes_on_as_it_is(raw: bytes) -> None:
    edit = Whole(Treatment.CHAT, hide_ids=True)
    assert edit.feed(raw, last=True) == raw and edit.told is None


def test_several_choices_tell_nothing() -> None:
    edit, _ = answered(Treatment.CHAT, {**CHAT, "choices": [*CHAT["choices"], *CHAT["choices"]]}, hide_ids=False)
    assert edit.told is not None and edit.told.prompt_ids is None


LAST = {"type": "response.completed", "response": {"output": "x\n\ny", "kv_transfer_params": {"remote_host": "h"}}}
STREAM = (
    b"event: response.created\ndata: " + json.dumps({"response": {"kv_transfer_params": None}}).encode() + b"\n\n"
    b'event: delta\ndata: {"delta":"no \\"kv_transfer_params\\" here"}\n\n'
    b"event: response.completed\ndata: " + json.dumps(LAST).encode() + b"\n\n"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_a_stream_of_the_responses_api_loses_them_in_its_last_event(size: int) -> None:
    edit = Events()
    out = b"".join(edit.feed(STREAM[at : at + size], last=False) for at in range(0, len(STREAM), size))
    out += edit.feed(b"", last=True)
    assert b"remote_host" not in out and out.count(b"\n\n") == 3
    assert out.startswith(STREAM[: STREAM.index(b"event: response.completed")])
    last = json.loads(out.split(b"data: ")[-1])
    assert last == {**LAST, "response": {**LAST["response"], "kv_transfer_params": None}}  # type: ignore[dict-item]
    assert edit.told is not None and json.loads(edit.told.params or b"") == {"remote_host": "h"}


def test_an_event_goes_on_as_soon_as_it_is_whole() -> None:
    edit = Events()
    assert edit.feed(b"data: 1\n\ndata: 2", last=False) == b"data: 1\n\n"
    assert edit.feed(b"\n", last=False) == b""
    assert edit.feed(b"\n", last=False) == b"data: 2\n\n"


# -- the decision ----------------------------------------------------------------------------------------------------------


def test_reading_counts_as_loading_and_is_weighed_against_computing() -> None:
    world = World(pool_of(2, 1), prefill_tokens_per_s=1000.0, transfer_bytes_per_s=1e9, handshake_s=0.5, kv_bytes_per_token=1e5)
    ticket = world.apart(4000, next_turn=Offer("d0", 3900))
    assert ticket.decision is not None and ticket.prefill is not None
    assert ticket.decision.below_tokens == {"decode": 3900} and ticket.decision.cached_tokens == 3900
    terms = ticket.decision.terms
    assert terms.load_s == pytest.approx(3900 * 1e5 / 1e9 + 0.5), "the bytes, and a first meeting"
    assert terms.prefill_s == pytest.approx(0.1, rel=0.2)
    world.router.costs.back.succeeded("d0", ticket.prefill.address)
    world.finish(ticket)
    again = world.apart(4000, next_turn=Offer("d0", 3900, frozenset({"p0", "p1"} - {ticket.prefill.address})))
    assert again.prefill is ticket.prefill and again.decision is not None
    assert again.decision.terms.load_s == pytest.approx(0.39), "they have met"


def test_what_is_computed_sooner_than_read_is_computed() -> None:
    world = World(pool_of(1, 1), prefill_tokens_per_s=1e6, transfer_bytes_per_s=1e9, handshake_s=0.5, kv_bytes_per_token=1e5)
    ticket = world.apart(4000, next_turn=Offer("d0", 3900))
    assert ticket.decision is not None and ticket.decision.below_tokens == {} and ticket.decision.terms.load_s == 0


def test_what_the_prefill_worker_holds_is_not_read() -> None:
    world = World(pool_of(1, 1), prefill_tokens_per_s=100.0, handshake_s=0.0)
    world.warm("p0", "talk", 3200)
    ticket = world.apart(4000, "talk", next_turn=Offer("d0", 3900))
    assert ticket.decision is not None and ticket.decision.below_tokens == {"decode": 700}
    world.finish(ticket)
    other = World(pool_of(1, 1), prefill_tokens_per_s=100.0, handshake_s=0.0)
    other.warm("p0", "talk", 3872)
    ticket = other.apart(4000, "talk", next_turn=Offer("d0", 3900))
    assert ticket.decision is not None and ticket.decision.below_tokens == {}, "vLLM reads nothing for fewer than 64 tokens"


def test_a_pair_that_failed_is_charged_and_a_worker_left_alone_computes() -> None:
    world = World(pool_of(1, 1), prefill_tokens_per_s=1000.0, handshake_s=0.0)
    world.router.costs.back.failed("d0", "p0", world.now_s)
    ticket = world.apart(4000, next_turn=Offer("d0", 3900))
    assert ticket.decision is not None and ticket.decision.below_tokens == {}, "5 s are more than the prefill takes"
    world.finish(ticket)
    world.now_s += 100
    ticket = world.apart(4000, next_turn=Offer("d0", 3900, frozenset({"p0"})))
    assert ticket.decision is not None and ticket.decision.below_tokens == {}


def test_a_retry_expects_nothing_to_read_and_the_speed_of_computing_is_not_learned_from_reading() -> None:
    world = World(pool_of(2, 1), prefill_tokens_per_s=1000.0, handshake_s=0.0)
    ticket = world.apart(4000, next_turn=Offer("d0", 3900))
    assert ticket.prefill is not None
    first = ticket.prefill.address
    ticket.job.next_turn = None
    world.router.prefill_failed(ticket, world.now_s, blame=False)
    world.router.prefill_again(ticket, world.now_s, [first])
    assert ticket.decision is not None and ticket.decision.below_tokens == {}
    world.finish(ticket)
    read = world.apart(4000, next_turn=Offer("d0", 3900))
    assert read.prefill is not None
    rate = world.router.costs.prefill_rate(read.prefill).seconds(1000, 0)
    world.now_s += 30.0
    world.prefilled(read, tokens=4000, cached_tokens=3900)
    assert world.router.costs.prefill_rate(read.prefill).seconds(1000, 0) == pytest.approx(rate, rel=0.3)


def test_going_back_to_the_decode_worker_stays_what_it_is() -> None:
    world = World(pool_of(1, 1), prefill_tokens_per_s=1000.0, handshake_s=0.0)
    world.warm("d0", "talk", 3900)
    ticket = world.submit(4000, "talk", mode=Mode.AUTO, next_turn=Offer("d0", 3900))
    assert ticket.decision is not None and ticket.decision.prefill is None, "it computes the rest, and nothing is moved"


# -- the configuration -----------------------------------------------------------------------------------------------------

GOOD = """
workers: {prefill: ["10.0.0.1:8100"], decode: ["10.0.0.2:8200"]}
tokens: {ask_workers: tokenize}
handoff: {next_turn: {enabled: true}}
"""


def test_a_configuration_that_can_work_is_taken() -> None:
    assert config.parse(GOOD).handoff.next_turn.enabled
    assert not config.parse(GOOD.replace("enabled: true", "ttl_s: 60")).handoff.next_turn.enabled, "off by default"


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("tokens: {ask_workers: tokenize}", "", "tokens"),
        ("ask_workers: tokenize", "learn: true", "tokens.models or tokens.ask_workers"),
        ("handoff: {", "handoff: {connector: llmd_sidecar, ", "handoff.connector"),
        ("handoff: {", "prefill: {tokenise_once: false}\nhandoff: {", "prefill.tokenise_once"),
        ("handoff: {", "envoy: {body_mode: full_duplex}\nhandoff: {", "envoy.body_mode"),
        ("enabled: true", "enabled: true, ttl_s: 5", "handoff.next_turn.margin_s"),
        ("enabled: true", "enabled: true, max_bytes: 0", "handoff.next_turn.max_bytes"),
    ],
)
def test_a_contradiction_is_refused_with_its_field(old: str, new: str, field: str) -> None:
    with pytest.raises(config.ConfigError, match=field):
        config.parse(GOOD.replace(old, new))
