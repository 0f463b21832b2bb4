import pytest

from paceline.benchmarks import COMPARISONS
from paceline.benchmarks.comparison import RunOutcome
from paceline.cli.prepare import make_run
from paceline.errors import UnknownNameError

CODECS = COMPARISONS["codecs"]
NUM_STEPS = 100


def compare(outcomes):
    return CODECS.compare(CODECS.choose([*outcomes], NUM_STEPS), outcomes)


def outcome(loss=2.0, accuracy=0.5, wire_bytes=1000, elapsed_s=4.0):
    return RunOutcome(loss, accuracy, wire_bytes, elapsed_s)


def test_codecs_are_compared_with_none_seed_by_seed():
    none = [outcome(), outcome(loss=8.0, accuracy=0.9), outcome(loss=1.0, accuracy=0.1)]
    ours = [
        outcome(loss=3.0, accuracy=0.48, wire_bytes=250, elapsed_s=2.0),
        outcome(loss=9.0, accuracy=0.90, wire_bytes=250, elapsed_s=8.0),
        outcome(loss=1.1, accuracy=0.11, wire_bytes=250, elapsed_s=5.0),
    ]
    reference, row = compare({"none": none, "int8": ours})
    assert reference.cells() == ("none", "1.0x", "2.0000", "1.000", "50.00%", "+0.00 ± 0.00", "1.00", "1x / 0")
    # Ratios 1.5, 1.125 and 1.1; differences -2, 0 and 1 percent; times 0.5, 2 and 1.25.
    assert row.cells() == ("int8", "4.0x", "3.0000", "1.125", "48.00%", "-0.33 ± 1.53", "1.25", "4x / 0.1")
    assert len(row.cells()) == len(row.headings)


def test_a_model_without_accuracy_has_none():
    (row,) = compare({"none": [outcome(accuracy=None)]})
    assert (row.accuracy, row.accuracy_difference, row.accuracy_spread) == (None, None, None)
    assert row.cells()[4:6] == ("", "")


def test_one_seed_has_no_spread():
    (row,) = compare({"none": [outcome()]})
    assert row.cells()[5] == "+0.00"


@pytest.mark.parametrize("comparison", COMPARISONS.values(), ids=COMPARISONS)
def test_the_reference_comes_first_and_each_way_once(comparison):
    reference, *others = comparison.choose(None, NUM_STEPS)

    def choose(*names):
        return list(comparison.choose(names, NUM_STEPS))

    assert choose() == [reference]
    assert choose(others[1], others[0], others[1]) == [reference, others[1], others[0]]
    assert choose(others[0], reference) == [reference, others[0]]
    with pytest.raises(UnknownNameError, match="each of --only must be a known name, but got 'nothing'"):
        choose(reference, "nothing")


@pytest.mark.parametrize("comparison", COMPARISONS.values(), ids=COMPARISONS)
def test_every_way_is_a_run_of_its_own(comparison):
    runs = [
        make_run("resnet", overrides).model_dump_json() for overrides in comparison.choose(None, NUM_STEPS).values()
    ]
    assert len(set(runs)) == len(runs)
