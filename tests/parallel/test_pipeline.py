"""Models run as pipelines learn what they learn on one process."""

import pytest
from pipeline_on_ranks import check_models, check_orders, lose_a_rank, sleep_in_order

from paceline.parallel.pipeline import ORDERS
from paceline.testing.processes import run_processes


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_order_learns_what_one_process_does(num_ranks: int) -> None:
    for result in run_processes(num_ranks, check_orders):
        assert result.value == list(ORDERS), result.output


def test_models_that_are_hard_to_cut_learn_what_they_do_on_one_process() -> None:
    for result in run_processes(2, check_models):
        assert result.value == [["stem", "stages.2.0"]], result.output


def test_a_lost_rank_is_an_error_that_a_restart_can_cure() -> None:
    first, second = run_processes(2, lose_a_rank)
    assert second.exit_code == 9
    assert "of the pipeline lost a rank: place 0 of 2 heard of its neighbours" in first.output


@pytest.mark.parametrize(("num_ranks", "tolerance"), [(2, 0.1), (4, 0.2)])
def test_the_bubble_on_sleeping_stages_is_that_of_the_formula(num_ranks: int, tolerance: float) -> None:
    """Four ranks on a machine of two cores, with other tests beside them, do not all wake in time."""
    settings = {"unit_s": 0.03, "num_tries": 6, "tolerance": tolerance}
    (first, *_) = run_processes(num_ranks, sleep_in_order, settings, timeout_s=55)
    assert first.value is not None, first.output
    for order, (measured, formula) in first.value.items():
        assert measured == pytest.approx(formula, rel=tolerance), order
