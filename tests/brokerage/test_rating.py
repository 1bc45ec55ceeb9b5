"""Rating: exact, rounded once, monotone."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerage.services.rating import rate, rate_answer

tokens = st.integers(0, 2**31 - 1)
rates = st.decimals(0, 999_999, places=12)


def test_it_works():
    cost = rate(
        prompt_tokens=1_000,
        completion_tokens=500,
        prompt_rate=Decimal("0.0000002"),
        completion_rate=Decimal("0.0000006"),
    )
    assert cost == Decimal("0.000500000")


@pytest.mark.parametrize(
    ("prompt_rate", "expected"),
    [
        ("0.0000000005", "0E-9"),
        ("0.0000000015", "2E-9"),
        ("0.0000000025", "2E-9"),
        ("0.000000002500000001".rstrip("1"), "2E-9"),
    ],
)
def test_a_half_goes_to_the_even_neighbour(prompt_rate, expected):
    cost = rate(
        prompt_tokens=1, completion_tokens=0, prompt_rate=Decimal(prompt_rate), completion_rate=Decimal(0)
    )
    assert cost == Decimal(expected)


@given(p=tokens, c=tokens, pr=rates, cr=rates)
def test_never_off_by_more_than_half_a_step(p, c, pr, cr):
    cost = rate(prompt_tokens=p, completion_tokens=c, prompt_rate=pr, completion_rate=cr)
    exact = p * Fraction(pr) + c * Fraction(cr)
    assert abs(Fraction(cost) - exact) <= Fraction(1, 2 * 10**9)
    assert cost.as_tuple().exponent == -9


@given(p=tokens, c=tokens, extra_p=st.integers(0, 1000), extra_c=st.integers(0, 1000), pr=rates, cr=rates)
def test_the_hold_for_the_most_covers_the_charge_for_less(p, c, extra_p, extra_c, pr, cr):
    charge = rate(prompt_tokens=p, completion_tokens=c, prompt_rate=pr, completion_rate=cr)
    hold = rate(prompt_tokens=p + extra_p, completion_tokens=c + extra_c, prompt_rate=pr, completion_rate=cr)
    assert charge <= hold


def test_an_answer_without_tokens_is_free_whatever_its_prompt():
    cost = rate_answer(
        prompt_tokens=9_000, completion_tokens=0, prompt_rate=Decimal(1), completion_rate=Decimal(1)
    )
    assert cost == 0


def test_negative_figures_are_refused():
    with pytest.raises(ValueError, match="negative"):
        rate(prompt_tokens=-1, completion_tokens=0, prompt_rate=Decimal(1), completion_rate=Decimal(1))
