"""The checker of histories finds what it is there to find."""

from typing import Any

import pytest

from support.stream_history import EPOCH, Beat, Event, History, Item, Joined, Reset, Told, faults


def event(sequence: int, key: str = "doc", revision: int = 1, status: str = "success", **more: Any) -> Event:
    kind = more.pop("type", "subagent_result")
    content = {"stage": "s", "status": status, "revision": revision, "result_key": key, "payload": more}
    return {"sequence": sequence, "type": kind, "content": content}


END = event(4, type="plan_step_completed", key="end")
PARTIAL = event(1, status="partial")
TRUTH: list[Event] = [PARTIAL, event(2, "rows"), event(3, revision=2), END]


def test_the_history_checker_accepts_correct_histories() -> None:
    whole = History("whole", [*TRUTH], finished=True)
    coalesced = History("coalesced", [*TRUTH[1:]], finished=True)
    again = History("again", [TRUTH[0], Reset(), *TRUTH], finished=True)
    cut = History("cut", [*TRUTH[:2]])
    other = History("epoch", [TRUTH[0], Reset(), event(EPOCH + 1, status="partial"), event(EPOCH + 2, revision=2)])
    assert faults([whole, coalesced, again, cut], TRUTH) == []
    assert faults([other], None) == []


@pytest.mark.parametrize(
    ("applied", "finished", "said"),
    [
        ([TRUTH[1], TRUTH[0]], False, "came after"),
        ([TRUTH[0], TRUTH[0]], False, "came after"),
        ([TRUTH[0], TRUTH[2], END], True, "2 (("),
        ([TRUTH[0], TRUTH[1], END], True, "3 (("),
        ([TRUTH[1], END], True, "was never delivered"),
        ([event(1, status="partial", other=1)], False, "elsewhere"),
        ([*TRUTH, event(5, "more")], True, "after the end"),
        (TRUTH[:3], True, "without an end"),
        ([TRUTH[0], event(EPOCH + 2, "x")], False, "without a reset"),
        ([event(1, revision=2), event(2, revision=1)], False, "back to revision"),
    ],
)
def test_the_history_checker_finds_impossible_histories(applied: list[Item], finished: bool, said: str) -> None:
    assert any(said in fault for fault in faults([History("one", applied, finished)], TRUTH))


def test_the_history_checker_finds_clients_that_disagree() -> None:
    one, two = History("one", [event(1, a=1)]), History("two", [event(1, a=2)])
    assert any("elsewhere" in fault for fault in faults([one, two]))


def of(step: str, event: Event) -> Event:
    return {**event, "plan_step_id": step}


def ended(sequence: int, step: str, status: str = "success") -> Event:
    return of(step, event(sequence, "end", status=status, type="plan_step_completed"))


def test_the_history_checker_follows_a_chain_of_steps() -> None:
    first, second = [of("p", event(1)), ended(2, "p")], [of("q", event(3)), ended(4, "q")]
    truth = [*first, *second]
    assert faults([History("all", [*truth], finished=True), History("half", [*first])], truth) == []
    early = History("early", [first[0], *second])
    assert any("has not ended" in fault for fault in faults([early], truth))
    half = History("half", [*first], finished=True)
    assert any("another state" in fault for fault in faults([half], truth))


def test_the_history_checker_requires_one_end_in_all_epochs() -> None:
    one = History("one", [ended(2, "p"), Reset(), ended(EPOCH + 2, "p", "worker_lost")])
    other = History("other", [ended(2, "p")])
    assert any("elsewhere" in fault for fault in faults([one]))
    assert any("elsewhere" in fault for fault in faults([other], [ended(EPOCH + 2, "p", "failed")]))
    assert faults([other], [ended(EPOCH + 2, "p")]) == []


def test_the_history_checker_counts_deliveries_in_earlier_epochs() -> None:
    one = History("one", [event(1), event(2, "rows"), event(3, "more"), Reset()])
    other = History("other", [event(1), event(3, "more"), Reset()])
    assert any("2 ((" in fault for fault in faults([one, other]))


def test_the_history_checker_allows_only_snapshots_to_start_later() -> None:
    said = [event(number, "hook", number, type="progress") for number in range(1, 5)]
    late: list[Item] = [Joined(2), *said[1:]]
    assert faults([History("all", [*said]), History("late", late)]) == []
    assert faults([History("all", [*said]), History("again", [said[0], Reset(3), *said[2:]])]) == []
    wrong: list[list[Item]] = [
        [said[0], Joined(2), *said[2:]],
        [Joined(1), *said[2:]],
        [Reset(2), *said[3:]],
        [*said[1:]],
    ]
    for applied in wrong:
        assert any("never delivered" in fault for fault in faults([History("all", [*said]), History("one", applied)]))


def test_the_history_checker_allows_skipped_partials_that_were_superseded() -> None:
    partial, rest = event(1, status="partial"), [event(2, "rows"), event(3, revision=2), END]
    everybody = [History("all", [partial, *rest], finished=True), History("cut", [rest[0]])]
    assert faults(everybody, [partial, *rest]) == []
    everybody += [History("never", [rest[0], END])]
    assert any(fault.startswith("never: 1 ((") for fault in faults(everybody, [partial, *rest]))


def test_the_history_checker_finds_events_after_the_end_of_a_subagent() -> None:
    completed = event(2, type="subagent_completed")
    assert any("is over" in fault for fault in faults([History("one", [event(1), completed, event(3, revision=2)])]))


def test_the_history_checker_finds_a_heartbeat_behind_its_client() -> None:
    assert faults([History("one", [event(1), Beat(1), Beat(9), Reset(), Beat(0)])]) == []
    assert any("is said" in fault for fault in faults([History("one", [event(7), Beat(6)])]))


def told(mark: str, revision: int, *accepted: int, ignored: tuple[str, ...] = (), unsure: bool = False) -> Told:
    return Told(None, "doc", (1, revision), mark, [*accepted], [*ignored], unsure)


def marked(sequence: int, mark: str, revision: int) -> Event:
    return event(sequence, revision=revision, status="partial", mark=mark)


def test_the_history_checker_compares_receipts_with_the_stream() -> None:
    truth = [marked(3, "b", 2), END]
    fine = [
        told("a", 1, 1),  # it was replaced
        told("b", 2, 3, ignored=("duplicate",)),
        told("c", 1, ignored=("superseded",)),
        told("d", 3, unsure=True),
    ]
    assert faults([], truth, fine) == []
    assert faults([], truth, [told("b", 2, ignored=("ended",), unsure=True)]) == []
    lost = told("e", 3, 9)
    assert any("is lost" in fault for fault in faults([], truth, [*fine, lost]))
    assert faults([], truth, [*fine, lost], losses=True) == []
    assert any("is lost" in fault for fault in faults([], truth, [*fine, told("e", 3, ignored=("duplicate",))]))
    assert any("was said" in fault for fault in faults([], truth, [*fine, told("a", 1, 3)]))
    assert any("is in the stream" in fault for fault in faults([], truth, [told("b", 2, ignored=("late",))]))
