"""Codec auto on real processes, whose links get slow and fast again."""

import pytest
from pydantic import ValidationError

from paceline.benchmarks import CodecChoiceBenchmark
from paceline.compression import Int8, NoCodec
from paceline.testing import netlab_missing

needs_netlab = pytest.mark.skipif(bool(netlab_missing()), reason=netlab_missing() or "a netlab can be made")


@pytest.mark.campaign
@pytest.mark.slow
@needs_netlab
@pytest.mark.timeout(180)
def test_a_link_that_gets_slow_is_followed_within_twenty_steps():
    bench = CodecChoiceBenchmark(trace=("1gbit", "5mbit"), steps_each=30, codecs=(NoCodec(),), num_hosts=2)
    rows = bench.measure()
    (followed,) = [row for row in rows if row.unit == "steps" and "5 Mbit/s" in row.case and "part 2" in row.case]
    assert followed.ours <= 20
    (total,) = [row for row in rows if row.metric == "time of all steps"]
    assert total.ratio < 0.75, "a step without a codec takes 80 times as long on the slow link, for 20 of 30 at most"


def test_rows_compare_with_each_codec_alone_and_with_the_best_of_each_part():
    bench = CodecChoiceBenchmark(trace=("1gbit", "20mbit"), steps_each=10, codecs=(NoCodec(), Int8()))
    seconds = {"auto": [1.0, 1.0, 4.0, 2.0], "none": [1.0, 1.0, 8.0, 8.0], "int8": [2.0, 2.0, 2.0, 2.0]}
    losses = {"auto": 2.02, "none": 2.0, "int8": 2.0}
    rows = bench._describe(seconds, losses, [[14, "int8"]])
    whole = [(row.reference_name, row.ours, row.ratio) for row in rows if row.metric == "time of all steps"]
    assert whole == [("int8", 40.0, 1.0), ("none", 40.0, pytest.approx(40 / 90))]
    parts = [(row.reference_name, row.ratio) for row in rows if row.metric == "median step"]
    assert parts == [("none", 1.0), ("int8", 1.5)]
    (followed,) = [row for row in rows if row.unit == "steps"]
    assert (followed.case, followed.metric, followed.ours) == ("auto, part 2 at 20 Mbit/s", "steps until int8", 4)
    assert [row.ratio for row in rows if row.unit == "nats"] == [1.01, 1.01]
    kept = [row for row in bench._describe(seconds, losses, [[3, "int8"]]) if row.unit == "steps"]
    assert [(row.case[:12], row.ours) for row in kept] == [("auto, part 1", 3), ("auto, part 2", 0)]
    assert not [row for row in bench._describe(seconds, losses, []) if row.unit == "steps"], "it never left none"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"codecs": (Int8(),)}, "codecs must have none among them"),
        ({"steps_each": 12}, "multiple of 5"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        CodecChoiceBenchmark(**settings)
