import pytest

from paceline.benchmarks.comparison import RunOutcome
from paceline.benchmarks.way_rows import WayRow, advise, describe_way, find_step, mean_curve, sort_rows


def make_outcome(*losses, wire_bytes=1000, step_s=0.5, accuracy=None):
    """Return the outcome of a run that was evaluated every 10 steps."""
    curve = [(10 * (place + 1), loss) for place, loss in enumerate(losses)]
    return RunOutcome(losses[-1], accuracy, wire_bytes, step_s, curve)


REFERENCE = [make_outcome(6.0, 4.0, 2.0)]


def describe(way, *ours, reference=REFERENCE, price=None, within=0.0):
    return describe_way(way, ours[0] if ours[0] is reference else ours, reference, price, within)


def test_equal_loss_is_looked_for_between_two_evaluations_and_never_beyond_the_last():
    curve = [(10, 6.0), (20, 4.0), (30, 2.0)]
    assert find_step(curve, 7.0) == 10, "before the first evaluation nothing is known"
    assert find_step(curve, 4.0) == 20
    assert find_step(curve, 3.0) == 25
    assert find_step(curve, 1.999) is None
    assert find_step([(10, 3.0), (20, 1.0), (30, 5.0)], 2.0) == 15, "the first time counts"
    assert find_step([], 2.0) is None


def test_curves_of_seeds_have_one_mean():
    assert mean_curve([[(10, 2.0), (20, 1.0)], [(10, 4.0), (20, 3.0), (30, 0.0)]]) == [(10, 3.0), (20, 2.0)]


def test_a_way_is_described_beside_the_reference():
    row = describe("int8", make_outcome(5.0, 2.0, 1.9, wire_bytes=60, accuracy=0.25))
    assert (row.steps_to_loss, row.time_to_loss_s, row.step_s, row.bytes_per_step) == (20, 10, 0.5, 2)
    assert row.cells() == ("int8", "10 s", "20", "0.5 s", "2 B", "1.9000", "0.950", "25.00%", "")
    assert len(row.cells()) == len(row.headings)
    reference = describe("none", REFERENCE)
    assert reference.cells() == ("none", "15 s", "30", "0.5 s", "33.3 B", "2.0000", "1.000", "", "the reference")


def test_what_ends_above_the_reference_has_reached_its_loss_only_within_the_margin():
    ours = make_outcome(6.0, 3.0, 2.06)
    missed, reached = (describe("diloco", ours, within=within) for within in (0.02, 0.05))
    assert (missed.time_to_loss_s, missed.cells()[1:3], missed.cells()[-1]) == (None, ("not reached", ""), "")
    # 2.1 is 90 / 94 of the way from 3 to 2.06.
    assert reached.steps_to_loss == pytest.approx(20 + 10 * 90 / 94)
    assert describe("local_sgd", make_outcome(6.0, 3.0, 2.2), within=0.02).cells()[-1] == "loss above 1.05"


def test_a_loss_below_zero_has_its_margin_above_it():
    reference = [make_outcome(-1.0, -2.0)]
    assert describe("none", reference, reference=reference, within=0.5).steps_to_loss == 10


def test_times_may_be_priced_for_other_hosts():
    row = describe("int8", make_outcome(5.0, 2.0, 1.9), price=lambda steps: 3.0 * steps)
    assert (row.step_s, row.time_to_loss_s) == (3.0, 60.0)


def test_rows_are_sorted_by_time_then_loss_then_come_failures():
    rows = [
        WayRow("failed", False, 0, failure="no"),
        describe("far", make_outcome(6.0, 4.0, 3.0)),
        describe("near", make_outcome(6.0, 4.0, 2.1)),
        describe("none", REFERENCE),
        describe("fast", make_outcome(2.0, 2.0, 2.0)),
    ]
    assert [row.way for row in sort_rows(rows)] == ["fast", "none", "near", "far", "failed"]
    assert sort_rows(rows)[-1].cells() == ("failed", "failed", *[""] * 6, "no")


def test_the_advice_names_the_fastest_with_its_cost():
    rows = [describe("none", REFERENCE), describe("diloco", make_outcome(4.0, 1.9, 2.02))]
    assert advise(rows, "on 4 hosts", 0.0) == (
        "Take diloco: on 4 hosts it needs 9.76 s where none needs 15 s (1.5 times as fast) to come within 0 % of its "
        "last loss, and its own loss ends 1.00 % higher."
    )


@pytest.mark.parametrize(
    "ours",
    [(6.0, 4.0, 1.95), (6.0, 1.9, 2.2), (6.0, 5.0, 2.2)],
    ids=["hardly faster", "fast and bad at the end", "not reached"],
)
def test_the_advice_is_to_stay_where_nothing_is_gained(ours):
    rows = [describe("every_step", REFERENCE), describe("local_sgd", make_outcome(*ours)), WayRow("x", False, 0)]
    assert advise(rows, "on 4 hosts", 0.02) == (
        "Stay with every_step: on 4 hosts no other way is 1.05 times as fast within 2 % of its last loss."
    )
