"""Policies of scaling, and what they may not return."""

import math
import os

import pytest

from paceline.elastic.policy import ScaleFacts, check_answer, efficient, read_prices
from paceline.errors import SettingsError

ODD_NUMBERS = ('{"price": 1' + "0" * 400 + "}", '{"price": 1' + "0" * 5000 + "}", "[" * 100_000)


def run_policy(throughput, num_calls=12, most_workers=8, prices=None):
    """Return the sizes that `efficient` chooses, call by call, where ``throughput(size)`` is what is measured."""
    size, measured, sizes = 1, {}, [1]
    for _ in range(num_calls):
        measured[size] = throughput(size)
        size = efficient(ScaleFacts(size, most_workers, measured[size], measured, prices or {}))
        sizes.append(size)
    return sizes


def test_it_grows_while_each_worker_brings_its_part():
    assert run_policy(lambda size: 100.0 * size)[-1] == 8


def test_it_takes_back_the_worker_that_brings_too_little_and_stays_there():
    sizes = run_policy(lambda size: 100.0 * min(size, 3) + size)
    assert sizes[:6] == [1, 2, 3, 4, 3, 3]
    assert set(sizes[4:]) == {3}


@pytest.mark.parametrize(("price", "size"), [(1.0, 5), (2.0, 2), (100.0, 1), (0.0, 8)])
def test_it_stays_within_the_budget(price, size):
    prices = {"price_per_hour": price, "budget_per_hour": 5.5}
    assert run_policy(lambda size: 100.0 * size, prices=prices)[-1] == size


def test_facts_say_what_each_worker_brings():
    assert ScaleFacts(4, 8, 100.0).samples_per_s_per_worker == 25.0


@pytest.mark.parametrize("answer", [0, -1, 9, True, 2.0, None, "3", math.nan, [2]])
def test_nonsense_is_refused(answer):
    with pytest.raises(SettingsError, match="must return a whole number from 1 to 8, but returned"):
        check_answer(answer, 8)


def test_a_number_in_range_is_taken():
    assert [check_answer(answer, 8) for answer in (1, 8)] == [1, 8]


@pytest.mark.parametrize("text", ["", "[1]", '{"price": "much"}', '{"price": true}', '{"price": NaN}', *ODD_NUMBERS])
def test_prices_must_be_numbers(tmp_path, text):
    (tmp_path / "prices").write_text(text)
    with pytest.raises(SettingsError, match=r"must hold (prices as JSON|one JSON object of numbers), but"):
        read_prices(tmp_path / "prices")
    (tmp_path / "prices").write_text('{"price_per_hour": 2}')
    assert read_prices(tmp_path / "prices") == {"price_per_hour": 2.0}


def test_a_pipe_of_prices_is_waited_for_by_nobody(tmp_path):
    os.mkfifo(tmp_path / "prices")
    with pytest.raises(SettingsError, match="must hold prices as JSON, but could not be read"):
        read_prices(tmp_path / "prices")
