import math

import pytest

from paceline.benchmarks.prediction import (
    PredictionBenchmark,
    Score,
    compare_memory,
    ideal_s,
    mean_error,
    predict_cold,
    predict_warm,
    rank_layouts,
)
from paceline.simulator.training.calibration import fit_published, load_posterior, load_published


def test_the_error_is_that_of_the_mean_logarithm():
    assert mean_error([math.log(1.1), -math.log(1.1)]) == pytest.approx(0.1)
    score = Score((0.1, -0.3), (0.1, 0.1), (0.5, 0.5))
    assert score.coverage == 0.5
    assert score.half_width == pytest.approx(math.expm1(0.1645))


def test_a_family_that_was_not_fitted_is_predicted_better_than_by_a_constant_share_of_the_peak():
    measured = load_published()
    others = [index for index, family in enumerate(measured.families) if family != "korthikanti"]
    posterior = fit_published(others)
    cold = predict_cold(measured, "korthikanti", posterior)
    assert cold.error < 0.15 < mean_error(cold.reference_log_ratios)
    assert cold.coverage == 1.0
    warm = predict_warm(measured, "korthikanti", posterior, 3)
    assert warm.error < cold.error
    assert warm.half_width < cold.half_width


def test_ideal_time_is_flops_at_the_peak():
    """Narayanan et al.'s 175B with full recomputation: 96 B s L h^2 (...) of which a quarter is recomputed."""
    measured = load_published()
    (index,) = [number for number, row in enumerate(measured.rows) if row.id == "P017"]
    flops = 72 * 64 * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (12 * 96 * 12288))
    assert ideal_s(measured.descriptions[index]) == pytest.approx(flops / (64 * 312e12), rel=0.01)


def test_order_and_memory_of_published_layouts_are_kept():
    measured = load_published()
    cold = {family: predict_cold(measured, family, load_posterior()) for family in dict.fromkeys(measured.families)}
    tau, num_pairs = rank_layouts(measured, cold)
    assert num_pairs >= 10
    assert tau >= 0.6
    assert mean_error(compare_memory()) < 0.12


def test_the_benchmark_is_known_by_name():
    from paceline.benchmarks import find_benchmark

    assert find_benchmark("prediction") is PredictionBenchmark
    with pytest.raises(ValueError, match="num_draws"):
        PredictionBenchmark(num_draws=0)
