"""The twin of the simulated engine does what the simulated engine does, at the same times."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.goodput import percentile
from workers.sim.blocks import BlockPool, Kv
from workers.sim.core import Core, CoreConfig, Identity, Load, Plan, Pull
from workers.sim.handoff import Handoffs
from workers.sim.host_cache import HostCache
from workers.sim.request import Sequence
from workers.sim.text import Stop
from workers.sim.timing import Profile
from workers.sim.twin import Done, Pulled, TwinConfig, TwinEngine
from workers.sim.twin_cache import Entered, Left, TwinCache
from workers.sim.twin_tier import TierConfig, TwinTier, host_tier

BLOCK = 16
PROFILE = Profile(handshake_s=0.3)


class CoreEngine:
    """The engine's own core on a virtual clock, with the interface of the twin."""

    def __init__(self, name: str, config: TwinConfig, profile: Profile, host_blocks: int = 0) -> None:
        core = CoreConfig(
            block_size=config.block_tokens,
            num_blocks=config.num_blocks + 1,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            mean_answer_tokens=0,
            lease_s=1e9,
        )
        self.name, self.profile = name, profile
        self.pool = BlockPool(core.num_blocks, core.block_size)
        self.handoffs = Handoffs(self.pool, lease_s=core.lease_s)
        host = HostCache(host_blocks, core.block_size) if host_blocks else None
        self.core = Core(core, self.pool, self.handoffs, Identity(name, "127.0.0.1", 1), host=host)
        self.loads: list[tuple[float, Load]] = []
        self.host_free_s = 0.0
        self.times: dict[str, list[float]] = {}
        self.ended: list[str] = []
        self.sequences: dict[str, Sequence] = {}
        self.plan: Plan | None = None
        self.end_s = self.wake_s = float("inf")
        self.pulls: list[tuple[float, float, Pull]] = []
        self.known: dict[str, float] = {}

    def submit(self, name, prompt, answer_tokens, now_s, params):
        times = self.times[name] = []
        sequence = Sequence(
            name,
            prompt,
            Stop(answer_tokens),
            kv_params=params,
            on_steps=lambda steps: times.extend([self.now_s] * len(steps)),
            on_end=lambda reason: self.ended.append(name),
        )
        self.sequences[name] = sequence
        self.core.add(sequence, now_s)
        self.wake_s = now_s

    def release(self, name, now_s):
        self.handoffs.release(name)
        self.wake_s = now_s

    def next_event_s(self):
        first = min([self.wake_s if self.plan is None else self.end_s, *(entry[0] for entry in (*self.pulls, *self.loads))])
        return None if first == float("inf") else first

    def advance(self, now_s):
        events = []
        while (at_s := self.next_event_s()) is not None and at_s <= now_s:
            self.now_s = at_s
            for entry in sorted((p for p in self.pulls if p[0] <= at_s), key=lambda p: p[0]):
                self.pulls.remove(entry)
                ready_s, began_s, pull = entry
                size = self.core.config.block_size
                states = [pull.sequence.context(i, size) for i in range(-(-len(pull.sequence.prompt) // size))]
                first = len(pull.sequence.blocks) - len(pull.remote_blocks)
                kv = [
                    Kv(states[i], pull.sequence.bytes_of(i * size, min((i + 1) * size, len(pull.sequence.prompt))))
                    for i in range(first, len(pull.sequence.blocks))
                ]
                self.core.pulled(pull.sequence, kv)
                params = pull.sequence.kv_params
                events.append(
                    Pulled(pull.sequence.request_id, ready_s, params["remote_engine_id"], pull.tokens, ready_s - began_s)
                )
                self.wake_s = at_s
            for entry in [each for each in self.loads if each[0] <= at_s]:
                self.loads.remove(entry)
                self.core.loaded(entry[1].sequence, entry[1].kv)
                self.wake_s = at_s
            if self.plan is not None and self.end_s <= at_s:
                plan, self.plan, self.ended = self.plan, None, []
                self.core.commit(plan, self.end_s)
                events += [self.done(name) for name in self.ended]
            if self.plan is None:
                self.wake_s = float("inf")
                plan = self.core.plan(at_s)
                for effect in self.core.effects:
                    if isinstance(effect, Load):
                        took_s = self.profile.load_s(len(effect.kv) * self.core.config.block_size)
                        self.host_free_s = max(at_s, self.host_free_s) + took_s
                        self.loads.append((self.host_free_s, effect))
                        continue
                    peer = effect.sequence.kv_params["remote_engine_id"]
                    known_s = self.known.setdefault(peer, at_s + self.profile.handshake_s)
                    self.pulls.append((max(at_s, known_s) + self.profile.transfer_s(effect.tokens), at_s, effect))
                self.core.effects.clear()
                if plan.work:
                    self.plan = plan
                    self.end_s = at_s + self.profile.step_s(
                        prefill_tokens=plan.prefill_tokens,
                        prefill_context_tokens=plan.prefill_context_tokens,
                        decodes=plan.decodes,
                        decode_context_tokens=plan.decode_context_tokens,
                    )
        return events

    def done(self, name):
        times, sequence = self.times[name], self.sequences[name]
        gaps = [b - a for a, b in itertools.pairwise(times)]
        found = sequence.cached_tokens + sequence.host_tokens
        return Done(name, times[-1], sequence.scheduled_s, times[0], found, percentile(gaps, 0.99) if gaps else None)


class Case:
    """One request of a workload: its blocks, each of which is 16 tokens, and what is done with it."""

    def __init__(self, at_s, ids, tokens, answer_tokens, handed_over):
        self.at_s, self.ids, self.tokens, self.answer_tokens, self.handed_over = at_s, ids, tokens, answer_tokens, handed_over
        self.keys = [hash(tuple(ids[: i + 1])) & (2**63 - 1) for i in range(tokens // BLOCK)]
        self.prompt = [(block * 7919 + i * 31) % 2**30 for block in ids for i in range(BLOCK)][:tokens]


def workload(seed, count, *, rate=30.0, most_blocks=60, most_answer=40):
    """Prompts with shared prefixes of several lengths, handed over or not."""
    rnd = random.Random(seed)
    cases, at_s = [], 0.0
    for _ in range(count):
        at_s += rnd.expovariate(rate)
        shared = [block * 10 + rnd.randrange(2) for block in range(rnd.randrange(most_blocks))]
        own = [rnd.randrange(10**6, 10**9) for _ in range(rnd.randrange(1, 4))]
        blocks = shared[: rnd.randrange(len(shared) + 1)] + own
        tokens = len(blocks) * BLOCK - rnd.randrange(BLOCK)
        cases.append(Case(at_s, blocks, tokens, rnd.randrange(1, most_answer), rnd.random() < 0.7))
    return cases


def run(make, cases, config, profile=PROFILE, host_blocks=0):
    """One prefill and one decode worker; the events of both legs by name. ``host_blocks``: of the prefill worker's host."""
    is_twin = issubclass(make, TwinEngine)
    host = {"host_blocks": host_blocks}
    if is_twin and host_blocks:
        host = {"tier": TwinTier(host_tier(host_blocks * BLOCK, profile, BLOCK))}
    elif is_twin:
        host = {}
    engines = {"p": make("p", config, profile, **host), "d": make("d", config, profile)}
    pending, by_name, done = list(enumerate(cases)), {}, {}

    def start(name, case, worker, now_s):
        whole = worker == "d" and not case.handed_over
        answer = case.answer_tokens if worker == "d" else 1
        if not is_twin:
            params = None
            if worker == "p":
                params = {"do_remote_decode": True}
            elif not whole:
                params = dict(engines["p"].sequences[name].kv_result)
            engines[worker].submit(name, case.prompt, answer, now_s, params)
        elif worker == "p":
            engines["p"].submit_prefill(name, case.keys, case.tokens, now_s)
        elif whole:
            engines["d"].submit_whole(name, case.keys, case.tokens, answer, now_s)
        else:
            engines["d"].submit_decode(name, case.keys, case.tokens, answer, now_s, peer="p")

    while True:
        times = [t for t in (engine.next_event_s() for engine in engines.values()) if t is not None]
        times += [pending[0][1].at_s] if pending else []
        if not times:
            break
        now_s = min(times)
        for worker, engine in engines.items():
            for event in engine.advance(now_s):
                if isinstance(event, Pulled):
                    engines["p"].release(event.name, event.at_s)
                    continue
                done[event.name, worker] = event
                if worker == "p":
                    start(event.name, by_name[event.name], "d", event.at_s)
        while pending and pending[0][1].at_s <= now_s:
            number, case = pending.pop(0)
            by_name[str(number)] = case
            start(str(number), case, "p" if case.handed_over else "d", now_s)
    return done


def compare(cases, config, tolerance=1e-6, host_blocks=0):
    core, twin = (run(make, cases, config, host_blocks=host_blocks) for make in (CoreEngine, TwinEngine))
    assert core.keys() == twin.keys()
    for key, expected in core.items():
        assert twin[key].at_s == pytest.approx(expected.at_s, rel=tolerance), key
        assert twin[key].first_token_s == pytest.approx(expected.first_token_s, rel=tolerance), key
        assert twin[key].scheduled_s == pytest.approx(expected.scheduled_s, rel=tolerance), key
        assert (twin[key].itl_p99_s or 0.0) == pytest.approx(expected.itl_p99_s or 0.0, rel=1e-5), key
        assert twin[key].cached_tokens == expected.cached_tokens, key


@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_when_it_does_on_the_real_core(seed):
    compare(workload(seed, 60), TwinConfig(block_tokens=BLOCK, num_blocks=4_000))


def test_long_prompts_in_chunks_between_decodes_take_the_same_time():
    cases = workload(7, 40, most_blocks=200)
    compare(cases, TwinConfig(block_tokens=BLOCK, num_blocks=6_000, max_num_batched_tokens=512, max_num_seqs=64))


def test_few_sequences_at_once_queue_alike():
    compare(workload(8, 50), TwinConfig(block_tokens=BLOCK, num_blocks=4_000, max_num_seqs=3))


def test_a_full_cache_evicts_alike():
    compare(workload(9, 80), TwinConfig(block_tokens=BLOCK, num_blocks=150))


@pytest.mark.parametrize("host_blocks", [200, 400])
def test_host_memory_behind_a_small_cache_is_read_alike(host_blocks):
    cases = workload(9, 80)
    config = TwinConfig(block_tokens=BLOCK, num_blocks=150)
    compare(cases, config, host_blocks=host_blocks)
    without, behind = (run(TwinEngine, cases, config, host_blocks=blocks) for blocks in (0, host_blocks))
    found = [sum(done.cached_tokens for (_, worker), done in each.items() if worker == "p") for each in (without, behind)]
    assert found[1] > 1.1 * found[0], "what the cache has lost comes from the host"


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([90, 120, 200]), st.sampled_from([3, 16]))
def test_whatever_comes_both_agree(seed, num_blocks, max_num_seqs):
    """Preemption included: which of two equal victims goes may differ, so the ends are compared as a whole."""
    cases = workload(seed, 30, rate=60.0, most_blocks=40)
    config = TwinConfig(block_tokens=BLOCK, num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    core, twin = run(CoreEngine, cases, config), run(TwinEngine, cases, config)
    assert core.keys() == twin.keys()
    mean = [sum(event.at_s for event in done.values()) / len(done) for done in (core, twin)]
    assert mean[1] == pytest.approx(mean[0], rel=0.03)


def test_preempted_sequences_start_again_and_show_the_gap():
    twin = TwinEngine("d", TwinConfig(block_tokens=BLOCK, num_blocks=10), PROFILE)
    for name in ("first", "second"):
        twin.submit_whole(name, [], 4 * BLOCK, 5 * BLOCK, 0.0)
    done = {event.name: event for event in twin.advance(1e9) if isinstance(event, Done)}
    assert twin.preemptions == 1
    assert done["second"].itl_p99_s > 10 * done["first"].itl_p99_s
    assert twin.cache.held_blocks == 0


def test_an_engine_that_is_done_holds_nothing_and_waits_for_nothing():
    twin = TwinEngine("p", TwinConfig(), PROFILE)
    twin.submit_prefill("a", range(10), 10 * 512 + 3, 1.0)
    (done,) = twin.advance(100.0)
    assert twin.next_event_s() is None
    assert (twin.load().running, twin.load().waiting, twin.cache.held_blocks) == (0, 0, 11)
    twin.release("a", done.at_s)
    assert twin.load().kv_usage == 0


def test_what_cannot_fit_is_refused():
    with pytest.raises(ValueError, match="do not fit"):
        TwinEngine("p", TwinConfig(num_blocks=3), PROFILE).submit_prefill("a", range(3), 3 * 512, 0.0)
    with pytest.raises(ValueError, match="max_num_seqs"):
        TwinConfig(max_num_seqs=600, max_num_batched_tokens=512)


def test_what_is_there_already_is_not_told_again_and_each_run_says_what_is_before_it():
    """Else it would count twice for whoever hears it, and go but once; or one behind a copy would begin a prompt."""
    cache, tier = TwinCache(8), TwinTier(TierConfig(8, 1.0))
    cache.changes = tier.changes = told = []
    mine, others = [None] * 2, [None] * 4
    assert cache.take(6)
    cache.register(mine, 0, [2, 3], before=1)
    tier.store([2, 3], 1)
    assert told == [Entered([2, 3], 1), Entered([2, 3], 1, below=True)]
    told.clear()
    cache.register(others, 0, [1, 2, 3, 4])
    tier.store([1, 2, 3, 4])
    assert told == [
        Entered([1], None),
        Entered([4], 3),
        *(Entered(keys, at, below=True) for keys, at in (([1], None), ([4], 3))),
    ]


def test_who_hears_what_enters_and_leaves_knows_what_is_there_when_prompts_begin_alike():
    """Prefills that begin alike and run at once: one has blocks of its own where the other's are in the cache."""
    rnd = random.Random(1)
    p = TwinEngine("p", TwinConfig(num_blocks=40, max_num_batched_tokens=2048), PROFILE)
    p.cache.changes, heard, began, at_s = [], Counter(), {None: None}, 0.0
    for number in range(200):
        start = 100 * rnd.randrange(4)
        keys = [*range(start, start + 8), *range(10_000 + 10 * number, 10_000 + 10 * number + rnd.randrange(1, 6))]
        began |= zip(keys, (None, *keys), strict=False)
        p.submit_whole(f"{number}", keys, len(keys) * 512 + 1, 2, at_s)
        at_s += rnd.choice([0.0, 0.0, 5.0])
        p.advance(at_s)
        changes, p.cache.changes = p.cache.changes, []
        for change in changes:
            (heard.update if isinstance(change, Entered) else heard.subtract)(change.keys)
            assert isinstance(change, Left) or change.keys[0] < 0 or change.before == began[change.keys[0]]
        assert max(heard.values(), default=0) <= 1


def test_the_end_of_a_prompt_is_forgotten_before_its_start():
    cache = TwinCache(4)
    blocks = [None] * 4
    assert cache.take(4)
    cache.register(blocks, 0, [1, 2, 3])
    cache.drop(blocks)
    assert cache.take(2)  # the empty one, then the last of the prompt
    assert cache.match([1, 2, 3]) == 2
    assert not cache.take(3)
