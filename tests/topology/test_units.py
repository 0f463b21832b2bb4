import pytest

from paceline.errors import SettingsError
from paceline.registry import Settings
from paceline.topology import BytesPerSecond, parse_size


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("8bit", 1),
        ("100mbit", 12.5e6),
        ("100gbit", 12.5e9),
        ("25Gb/s", 25e9 / 8),
        ("12.5GB/s", 12.5e9),
        ("1 tB", 1e12),
        ("2KiB/s", 2048),
        ("1.5e9B/s", 1.5e9),
        (3000, 3000),
        (0.5, 0.5),
    ],
)
def test_a_speed_is_bytes_a_second_whatever_it_is_written_in(text, bytes_per_s):
    assert BytesPerSecond.parse(text) == bytes_per_s


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("100MB", 1e8), ("64MiB", 2**26), ("4096", 4096), (17, 17), ("1GiB", 2**30), ("8kbit", 1000), ("3 B", 3)],
)
def test_a_size_is_bytes(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gbit",
        "0gbit",
        "-1gbit",
        "nan",
        "inf",
        "1e999",
        "1.2.3gbit",
        "5 parsecs",
        "100ibit",
        "3/s",
        "50",
        "1.5e9",
        True,
        None,
    ],
)
def test_what_is_no_speed_is_refused_with_examples(text):
    with pytest.raises(SettingsError, match=r"^a speed must be like 50mbit, 100gbit or 12\.5GB/s, with its unit"):
        BytesPerSecond.parse(text)


@pytest.mark.parametrize("text", ["100MB/s", "0", "many"])
def test_what_is_no_size_is_refused_with_examples(text):
    with pytest.raises(SettingsError, match=r"^a size must be like 100MB, 64MiB"):
        parse_size(text)


def test_a_field_takes_text_and_is_stored_as_a_number():
    class Cable(Settings):
        speed: BytesPerSecond

    cable = Cable.model_validate({"speed": "10gbit"})
    assert cable.speed == 1.25e9
    assert cable.model_dump_json() == '{"speed":1250000000.0}'
    assert Cable.model_validate_json(cable.model_dump_json()) == cable
