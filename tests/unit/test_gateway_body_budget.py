"""Bytes of bodies on their way: counted by key, by customer and in all."""

from typing import Any

import pytest

from gateway.http.errors import RejectionError
from gateway.http.request import BodyBudget
from identities import identity
from scheduler.errors import RequestError


def who(customer: str, key: str) -> Any:
    """An identity of which only these two are looked at."""
    return identity(customer_id=customer, key_id=key)


def code_of(budget: BodyBudget, customer: str, key: str, count: int) -> str:
    """Take so much for one body and keep it; the code of the rejection, or nothing."""
    try:
        budget.share(who(customer, key)).take(count)
    except RequestError as error:
        return error.code
    return ""


def test_each_limit_rejects_by_itself() -> None:
    """A key's, a customer's over all of its keys, and that of all; what was rejected is not counted."""
    budget = BodyBudget(in_all=100, of_customer=60, of_key=40)

    assert code_of(budget, "a", "a1", 41) == "rate_limit_exceeded"
    assert code_of(budget, "a", "a1", 40) == ""
    assert code_of(budget, "a", "a1", 1) == "rate_limit_exceeded"
    assert code_of(budget, "a", "a2", 21) == "rate_limit_exceeded"
    assert code_of(budget, "a", "a2", 20) == ""
    assert code_of(budget, "b", "b1", 40) == ""
    assert code_of(budget, "c", "c1", 1) == "no_capacity"
    assert budget.in_all == 100


def test_what_is_given_back_is_free_and_leaves_nothing() -> None:
    """Once, however often it is given back; a body of unknown length takes as it comes."""
    budget = BodyBudget(in_all=100, of_customer=60, of_key=40)
    share = budget.share(who("a", "a1"))
    for _ in range(4):
        share.take(10)
    with pytest.raises(RejectionError):
        share.take(1)
    share.give_back()
    share.give_back()

    assert (budget.in_all, budget._held) == (0, {})
    assert code_of(budget, "a", "a1", 40) == ""
