import math

import pytest
from story import make_record

from paceline.monitor.events import CheckpointSaved, ExpertsUsed
from paceline.monitor.formatting import describe, duration, number, one_line, printable, share, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.23456, "1.235"),
        (0, "0"),
        (12345.6, "12,346"),
        (1.5e-4, "0.00015"),
        (1e12, "1.000e+12"),
        (math.nan, "nan"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value_s", "text"),
    [(0.1234, "0.123 s"), (59, "59 s"), (303, "5 min 03 s"), (7500, "2 h 05 min"), (math.inf, "?")],
)
def test_durations(value_s: float, text: str) -> None:
    assert duration(value_s) == text


@pytest.mark.parametrize(("ranks", "told"), [([2], "rank 2 was lost"), ([0, 1, 3], "ranks 0, 1 and 3 were lost")])
def test_lost_ranks(ranks: list[int], told: str) -> None:
    saved = CheckpointSaved(path="step-5", num_bytes=1, duration_s=0.1, lost_ranks=ranks)
    assert describe(make_record(saved, 5)) == f"step 5: {told}; what the others had learnt is saved in step-5"


def test_uses_of_experts() -> None:
    used = ExpertsUsed(layers=["layers.0.mlp", "layers.1.mlp"], counts=[[20, 20], [45, 5]], num_dropped=[0, 10])
    assert describe(make_record(used, 5)) == (
        "step 5: 10 of 100 uses of experts were dropped (10%); the busiest expert, in layers.1.mlp, takes 1.8 times "
        "its even share"
    )
    idle = ExpertsUsed(layers=["mlp"], counts=[[0, 0]], num_dropped=[0])
    assert "0 of 0 uses of experts were dropped (0.0%)" in str(describe(make_record(idle, 5)))


def test_sizes_and_shares() -> None:
    assert [size(num_bytes) for num_bytes in (7, 57_800_000, 2e15)] == ["7 B", "57.8 MB", "2,000 TB"]
    assert [share(part) for part in (0.0123, 0.5, 1, math.nan)] == ["1.2%", "50%", "100%", "?"]


def test_texts_keep_their_letters_and_lose_their_power() -> None:
    assert printable("a\tb\r\nनमस्ते 👍 \x1b\x07\u202e\udcff") == "a   b\nनमस्ते 👍 \\x1b\\x07\\u202e\\udcff"
    assert printable("é▸", "latin-1") == "é\\u25b8"
    assert one_line(" a\n b ") == "a b"
    assert one_line("x" * 20, max_length=10) == "xxxxxxx..."
