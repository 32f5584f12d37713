"""The circuit breaker, on a clock of its own."""

from __future__ import annotations

from slipstream.serving.routing.breaker import Breaker


def broken(failures: int = 3) -> Breaker:
    breaker = Breaker(failures, open_s=1.0, most_s=5.0)
    for _ in range(failures):
        breaker.ended(False, False, now=0.0)
    return breaker


def test_it_opens_after_failures_in_a_row_and_a_success_between_them_starts_the_count_again():
    breaker = Breaker(3, 1.0, 5.0)
    for ok in (False, False, True, False, False):
        breaker.ended(False, ok, 0.0)
        assert breaker.state(0.0) == "closed"
    breaker.ended(False, False, 0.0)
    assert breaker.state(0.0) == "open" and not breaker.allows(0.5) and breaker.opens_in(0.5) == 0.5


def test_after_a_while_one_request_is_tried_and_decides():
    breaker = broken()
    assert breaker.allows(1.0) and breaker.sent(1.0) is True
    assert not breaker.allows(1.0), "a second one while the first is tried"
    breaker.ended(True, True, 1.2)
    assert breaker.state(1.2) == "closed" and breaker.sent(1.2) is False


def test_each_failed_try_doubles_the_time_up_to_a_bound():
    breaker, now, waits = broken(), 0.0, []
    for _ in range(5):
        waits.append(breaker.opens_in(now))
        now += waits[-1]
        breaker.ended(breaker.sent(now), False, now)
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_try_that_ends_without_an_answer_leaves_the_next_one_to_decide():
    breaker = broken()
    breaker.ended(breaker.sent(1.0), None, 1.1)
    assert breaker.allows(1.1) and breaker.state(1.1) == "half_open"


def test_answers_to_requests_from_before_it_opened_do_not_close_it():
    breaker = broken()
    breaker.ended(False, True, 0.5)
    assert breaker.state(0.5) == "open"
    breaker.sent(1.0)
    breaker.ended(False, None, 1.0)
    assert not breaker.allows(1.0)


def test_another_process_starts_with_a_clean_slate():
    breaker = broken()
    breaker.reset()
    assert breaker.state(0.0) == "closed" and breaker.opened == 0
