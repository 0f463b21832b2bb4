import pytest
from pydantic import ValidationError

from paceline.benchmarks import LayoutsBenchmark, Workers
from paceline.benchmarks.layouts import Measured, measure_cases
from paceline.monitor.events import PipelineMeasured

TINY = {"model": {"width": 16, "num_layers": 2, "num_heads": 2}, "sequence_length": 16, "num_samples": 4}


def test_both_sides_of_a_layout_compute_the_same():
    """The benchmark refuses sides whose losses differ after their steps."""
    cases = ("tensor", "zero_2", "zero_1", "1f1b", "context")
    rows = LayoutsBenchmark(**TINY, cases=cases, num_pairs=4, num_warm_up=1, num_bubbles=1).measure()
    assert [(row.case, row.metric, row.reference_name) for row in rows] == [
        ("tensor 2", "step time", "parallelize_module"),
        ("sharded 2, zero_stage 2", "step time", "fully_shard, no reshard"),
        ("sharded 2, zero_stage 1", "step time", "DDP, ZeroRedundancyOptimizer"),
        ("pipeline 2, 1f1b", "step time", "Schedule1F1B"),
        ("pipeline 2, 1f1b", "bubble", "formula for equal stages"),
        ("context 2", "step time", "one process"),
    ]
    assert all(
        row.ours > 0 and row.reference > 0 and row.ratio_lower <= row.ratio_upper for row in rows if row.unit == "s"
    )
    bubble = rows[4]
    assert 0 < bubble.ours < 1
    assert bubble.reference == pytest.approx(1 / 5), "two ranks, four micro-batches"


def tell(began_s, ended_s):
    """Return what a rank says of a step in which it worked once."""
    return PipelineMeasured(
        order="gpipe",
        ranks=[0, 1],
        num_micro_batches=4,
        stages_per_rank=1,
        formula=0.2,
        began_unix_s=100.0 + began_s,
        works=["forward"],
        stages=[0],
        micro_batches=[0],
        began_s=[0.0],
        ended_s=[ended_s - began_s],
    )


@pytest.fixture
def starts(monkeypatch):
    """Processes answer at once: rank r's losses are r + 1 on both sides; how many were started for which cases."""
    asked = []

    def start(workers, function, settings, names):
        assert function is measure_cases
        asked.append((workers.num_workers, names))
        answers = {}
        for rank in range(workers.num_workers):
            times = {"ours": [2.0, 2.0 - rank], "reference": [1.0, 4.0 * rank]}
            losses = {"ours": 1.5, "reference": rank + 1.0}
            told = [tell(0.0, 6.0 + 2 * rank), tell(0.0, 10.0)] if names == ["gpipe"] else []
            answers[rank] = [Measured(times, dict(losses), told) for _ in names]
        return answers

    monkeypatch.setattr(Workers, "start", start)
    return asked


def test_the_slowest_rank_counts(starts):
    (row,) = LayoutsBenchmark(cases=("zero_3",)).measure()
    assert (row.ours, row.reference, row.ratio) == (2.0, 2.5, 1.25)
    assert starts == [(2, ["zero_3"])]


def test_cases_of_as_many_ranks_share_processes(starts, monkeypatch):
    monkeypatch.setattr("paceline.benchmarks.layouts._LOSS_TOLERANCE", 1.0)  # four answers here are no 1.5 on average
    rows = LayoutsBenchmark(cases=("data_tensor", "context", "zero_1")).measure()
    assert starts == [(2, ["context", "zero_1"]), (4, ["data_tensor"])]
    assert [row.case for row in rows] == ["data 2 x tensor 2", "context 2", "sharded 2, zero_stage 1"]


def test_the_bubble_is_the_median_step_beside_the_formula(starts):
    _, row = LayoutsBenchmark(cases=("gpipe",)).measure()
    assert row.ours == pytest.approx((2 / 16 + 0) / 2)
    assert (row.metric, row.reference, row.ratio) == ("bubble", 0.2, row.ours / 0.2)


def test_sides_that_compute_otherwise_are_refused(starts):
    with pytest.raises(AssertionError, match=r"both sides of data_tensor must compute the same: .*1\.5.*2\.5"):
        LayoutsBenchmark(cases=("data_tensor",)).measure()


@pytest.mark.parametrize("sizes", [{"sequence_length": 126}, {"num_samples": 6}], ids=["tokens", "samples"])
def test_sizes_that_ranks_cannot_share_are_refused(sizes):
    with pytest.raises(ValidationError, match="sequence_length and num_samples must be multiples of 4"):
        LayoutsBenchmark(**sizes)
