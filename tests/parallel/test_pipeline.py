"""Models run as pipelines learn what they learn on one process."""

import pytest
from pipeline_on_ranks import check_models, check_orders, compute_at_the_same_time, lose_a_rank, replay_orders

from paceline.parallel.pipeline import ORDERS
from paceline.testing.processes import run_processes


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_order_learns_what_one_process_does(num_ranks: int) -> None:
    for result in run_processes(num_ranks, check_orders):
        assert result.value == list(ORDERS), result.output


def test_models_that_are_hard_to_cut_learn_what_they_do_on_one_process() -> None:
    for result in run_processes(2, check_models):
        assert result.value == [["stem", "stages.2.0"]], result.output


def test_a_lost_rank_is_an_error_that_a_restart_can_cure() -> None:
    first, second = run_processes(2, lose_a_rank)
    assert second.exit_code == 9
    assert "of the pipeline lost a rank: position 0 of 2 reports" in first.output


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_bubble_of_what_ranks_do_one_after_another_is_that_of_the_formula(num_ranks: int) -> None:
    (first, *_) = run_processes(num_ranks, replay_orders)
    assert first.value is not None, first.output
    assert first.value.keys() == ORDERS.keys()
    for order, (replayed, formula) in first.value.items():
        assert replayed == pytest.approx(formula), order


def test_stages_compute_at_the_same_time() -> None:
    for result in run_processes(2, compute_at_the_same_time):
        assert result.value is True, result.output
