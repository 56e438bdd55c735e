"""Placement: who may be chosen, prefix against load, floods, rejoining workers, several routers (CASES B44)."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.prefix_hash import PrefixKey, block_hashes
from router.place import (
    AFFINITY_RATIO,
    AFFINITY_SLACK,
    RAMP_S,
    choose_decode,
    choose_prefill,
    place,
    usable,
)
from router.prefix_memory import PrefixMemory
from router.views import PromptView, WorkerView
from tests.unit.router.workers import record, view

PROMPT = PromptView(num_tokens=100, model_revision="r1", spread=1)


def chosen_id(workers: list[WorkerView], prompt: PromptView = PROMPT) -> str | None:
    found = choose_decode(workers, prompt)
    return None if found is None else found[0].record.worker_id


UNFIT = {
    "not ready": replace(view("x"), record=record("x", ready=False)),
    "draining": replace(view("x"), record=record("x", draining=True)),
    "suspected": replace(view("x"), suspected=True),
    "pool too small": replace(view("x"), record=record("x", total_blocks=6)),
    "tried before": replace(view("x"), record=record("x", epoch="tried")),
    "other numerics": replace(view("x"), record=record("x", numerics_class="class-b")),
    "lacks the drafter": replace(view("x"), record=record("x", drafters=("none",))),
}


@pytest.mark.parametrize("unfit", UNFIT.values(), ids=UNFIT.keys())
def test_an_unfit_worker_is_never_chosen_however_idle_it_is(unfit: WorkerView) -> None:
    prompt = replace(PROMPT, numerics_class="class-a", excluded=frozenset({"tried"}), drafter="ngram")
    assert chosen_id([unfit], prompt) is None
    assert chosen_id([unfit, view("busy", load=50)], prompt) == "busy"


def test_without_a_prefix_the_least_busy_worker_is_chosen() -> None:
    assert chosen_id([view("a", 3), view("b", 1), view("c", 2)]) == "b"


def test_the_longest_prefix_wins_among_workers_that_are_not_much_busier() -> None:
    assert chosen_id([view("a", 2, 32), view("b", 1, 64), view("c", 1)]) == "b"


def test_a_busy_holder_of_the_prefix_is_passed_over() -> None:
    assert chosen_id([view("holder", 9, 96), view("idle", 2)]) == "idle"


def test_equals_share_the_work_by_request() -> None:
    workers = [view("a"), view("b"), view("c")]
    counts = Counter(chosen_id(workers, replace(PROMPT, spread=spread)) for spread in range(300))
    assert min(counts.values()) > 60


def test_a_hot_worker_that_reports_itself_idle_is_not_believed_over_our_own_count() -> None:
    hot = replace(view("hot", load=20), reported_load=0)
    assert chosen_id([hot, view("cool", load=3)]) == "cool"


def test_load_of_other_routers_counts_through_fresh_reports_with_what_was_sent_since() -> None:
    others = replace(view("a", load=1), reported_load=10, sent_since_report=1)
    assert others.load == 11
    assert chosen_id([others, view("b", load=5)]) == "b"


def test_a_stale_worker_is_used_only_where_no_fresh_one_is_left() -> None:
    stale = replace(view("stale"), fresh=False)
    assert chosen_id([stale, view("fresh", load=7)]) == "fresh"
    assert chosen_id([stale]) == "stale"


def test_a_rejoining_worker_gets_its_share_and_is_not_flooded() -> None:
    loads = {"old-0": 40, "old-1": 40, "back": 0}
    for spread in range(30):
        workers = [view(name, load, seen_s=0.5 if name == "back" else 1e9) for name, load in loads.items()]
        loads[chosen_id(workers, replace(PROMPT, spread=spread)) or ""] += 1
    assert 0 < loads["back"] <= 40
    aged = [view("old-0", 40), view("back", 0, seen_s=RAMP_S)]
    assert chosen_id(aged) == "back"


def test_a_rejoining_worker_does_not_take_everything_at_once_from_many_short_requests() -> None:
    workers = [view("old", 30), view("back", 29, seen_s=RAMP_S / 2)]
    assert chosen_id(workers) == "back"
    assert chosen_id([view("old", 30), view("back", 31, seen_s=RAMP_S / 2)]) == "old"


def test_a_flood_of_one_prefix_over_two_workers_stays_within_two_to_one() -> None:
    loads = Counter({"a": 0, "b": 0})
    holders: set[str] = set()
    for spread in range(200):
        workers = [view(name, loads[name], 96 if name in holders else 0) for name in ("a", "b")]
        name = chosen_id(workers, replace(PROMPT, spread=spread)) or ""
        holders.add(name)
        loads[name] += 1
        if sum(loads.values()) >= 6:
            assert max(loads.values()) <= 2 * min(loads.values())


@pytest.mark.parametrize("arrivals_a_report", [1, 9, 60])
def test_three_routers_together_keep_the_bound(arrivals_a_report: int) -> None:
    names = ("a", "b")
    own = [Counter(dict.fromkeys(names, 0)) for _ in range(3)]
    at_report = [Counter(count) for count in own]
    holders: list[set[str]] = [set(), set(), set()]
    reported = Counter(dict.fromkeys(names, 0))
    for arrival in range(300):
        if arrival % arrivals_a_report == 0:
            reported = Counter({name: sum(count[name] for count in own) for name in names})
            at_report = [Counter(count) for count in own]
        router = arrival % 3
        workers = [
            replace(
                view(name, own[router][name], 96 if name in holders[router] else 0),
                reported_load=reported[name],
                sent_since_report=own[router][name] - at_report[router][name],
            )
            for name in names
        ]
        name = chosen_id(workers, replace(PROMPT, spread=arrival)) or ""
        holders[router].add(name)
        own[router][name] += 1
    totals = [sum(count[name] for count in own) for name in names]
    assert max(totals) <= 2 * min(totals)


views = st.builds(
    lambda index, load, overlap, ready, draining, suspected, fresh, numerics, seen_s: replace(
        view(f"w{index}", load, overlap * 16, seen_s),
        record=record(f"w{index}", ready=ready, draining=draining, numerics_class=numerics),
        suspected=suspected,
        fresh=fresh,
    ),
    index=st.integers(0, 99),
    load=st.integers(0, 50),
    overlap=st.integers(0, 6),
    ready=st.booleans(),
    draining=st.booleans(),
    suspected=st.booleans(),
    fresh=st.booleans(),
    numerics=st.sampled_from(["class-a", "class-b"]),
    seen_s=st.sampled_from([0.0, 3.0, 1e9]),
)
workers_lists = st.lists(views, max_size=8, unique_by=lambda worker: worker.record.worker_id)
prompts = st.builds(
    PromptView,
    num_tokens=st.integers(1, 2000),
    model_revision=st.just("r1"),
    numerics_class=st.sampled_from([None, "class-a"]),
    spread=st.integers(0, 1000),
)


@given(workers_lists, prompts)
def test_a_choice_is_usable_bounded_and_made_whenever_one_is_possible(
    workers: list[WorkerView], prompt: PromptView
) -> None:
    found = choose_decode(workers, prompt)
    able = [worker for worker in workers if usable(worker, prompt)]
    assert (found is None) == (not able)
    if found is None:
        return
    assert found[0] in able
    if all(worker.seen_s >= RAMP_S for worker in able) and found[0].fresh:
        least = min(worker.load for worker in able if worker.fresh)
        assert found[0].load <= AFFINITY_RATIO * least + AFFINITY_SLACK


@given(workers_lists, workers_lists, prompts)
def test_prefill_peers_are_of_the_decode_workers_numerics_class(
    decode: list[WorkerView], prefill: list[WorkerView], prompt: PromptView
) -> None:
    placement = place(decode, prefill, prompt)
    if placement is None:
        return
    by_id = {worker.record.worker_id: worker for worker in prefill}
    for peer in placement.prefill:
        assert by_id[peer.worker_id].record.numerics_class == placement.decode.numerics_class
        assert usable(by_id[peer.worker_id], prompt)


def test_prefill_workers_without_the_hidden_planes_of_the_decode_worker_are_left_out() -> None:
    decode = replace(view("d"), record=record("d", hidden_layers=(2, 15)))
    bare = replace(view("p0"), record=record("p0", "prefill"))
    full = replace(view("p1"), record=record("p1", "prefill", hidden_layers=(2, 15, 28)))
    assert [peer.worker_id for peer in choose_prefill([bare, full], decode, PROMPT)] == ["p1"]


def test_the_prefill_worker_that_holds_the_prefix_comes_first_unless_it_is_busy() -> None:
    decode = view("d")
    holder, idle = view("holder", 1, 64), view("idle", 0)
    assert next(peer.worker_id for peer in choose_prefill([idle, holder], decode, PROMPT)) == "holder"
    busy = replace(holder, in_flight=20)
    assert next(peer.worker_id for peer in choose_prefill([idle, busy], decode, PROMPT)) == "idle"


def test_the_memory_forgets_the_deepest_blocks_of_the_oldest_prefix_first() -> None:
    key = PrefixKey("class-a", b"")
    first = block_hashes(list(range(64)), 16, key)
    second = block_hashes(list(range(100, 164)), 16, key)
    memory = PrefixMemory()
    memory.remember("e", first, capacity_blocks=6)
    memory.remember("e", second, capacity_blocks=6)
    assert memory.overlap_blocks("e", second) == 4
    assert memory.overlap_blocks("e", first) == 2
    assert memory.num_blocks() == 6
    assert memory.overlap_blocks("another life", first) == 0
    memory.keep_only(frozenset())
    assert memory.num_blocks() == 0
