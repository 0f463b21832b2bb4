import pytest

from paceline.benchmarks import ServerBenchmark, Workers
from paceline.benchmarks.server import time_rounds
from paceline.testing import run_processes


def test_pushes_are_timed_beside_bare_messages():
    arguments = {"rule": {"name": "asgd"}, "width": 8, "num_layers": 1, "num_pushes": 2, "num_rounds": 3}
    results = run_processes(3, "paceline.benchmarks.server:time_rounds", arguments, timeout_s=55)
    assert [result.exit_code for result in results] == [0, 0, 0], results[0].output
    for result in results:
        assert len(result.value["ours"]) == len(result.value["bare"]) == 3
        assert min(result.value["ours"] + result.value["bare"]) > 0
        assert result.value["num_bytes"] == 4 * (8 * 256 + 8 * 8 * 4 + 3 * 8 * 24 + 3 * 8)


def test_the_slowest_worker_counts(monkeypatch):
    def start(workers, function, rule, width, num_layers, num_pushes, num_rounds):
        assert function is time_rounds
        assert (rule["name"], num_pushes, num_rounds) == ("asgd", 20, 2)
        return {
            rank: {"ours": [2.0, 4.0 + rank], "bare": [1.0 + rank, 3.0], "num_bytes": 2_500_000} for rank in range(3)
        }

    monkeypatch.setattr(Workers, "start", start)
    (row,) = ServerBenchmark(num_pushes=20, num_rounds=2).measure()
    # 40 pushes in 2 and in 6 s, and in 3 and 3 s.
    assert (row.ours, row.reference) == (pytest.approx((20 + 40 / 6) / 2), pytest.approx(40 / 3))
    assert row.ratio == pytest.approx((1.5 + 0.5) / 2)
    assert row.case == "asgd, 2 workers, 2.5 MB each way"
