import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from story import make_record, make_start, make_step

from paceline.errors import PacelineError
from paceline.monitor import EventError, Record, RunStarted, Warned, from_json, list_kinds, to_json
from paceline.monitor.events import Float, Int

always = settings(deadline=None, derandomize=True)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(st.characters(), max_size=20)  # all of Unicode: line breaks, control characters, lone surrogates
JSON = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda items: st.lists(items, max_size=3) | st.dictionaries(TEXTS, items, max_size=3),
    max_leaves=6,
)
BY_ANNOTATION: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXTS,
    str | None: st.none() | TEXTS,
    Int: INTEGERS,
    bool: st.booleans(),
    Int | None: st.none() | INTEGERS,
    Float: st.floats(),
    Float | None: st.none() | st.floats(),
    list[str]: st.lists(TEXTS, max_size=3),
    list[Int]: st.lists(INTEGERS, max_size=3),
    list[list[Int]]: st.lists(st.lists(INTEGERS, max_size=3), max_size=3),
    list[Float]: st.lists(st.floats(), max_size=3),
    dict[str, Float] | None: st.none() | st.dictionaries(TEXTS, st.floats(), max_size=3),
    dict[str, Float]: st.dictionaries(TEXTS, st.floats(), max_size=3),
    dict[str, str]: st.dictionaries(TEXTS, TEXTS, max_size=3),
    dict[str, Any]: st.dictionaries(TEXTS, JSON, max_size=3),
}


def strategies_of(cls: type) -> dict[str, st.SearchStrategy[Any]]:
    return {one.name: BY_ANNOTATION[one.type] for one in dataclasses.fields(cls) if one.name != "event"}


EVENTS = st.one_of([st.builds(cls, **strategies_of(cls)) for cls in list_kinds().values()])


def comparable(value: Any) -> Any:
    """Return `value` with NaN in a form that equals itself, and types where == is blind to them."""
    if dataclasses.is_dataclass(value):
        return type(value), comparable({one.name: getattr(value, one.name) for one in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [comparable(item) for item in value]
    return type(value), repr(value)


def test_there_is_a_class_for_every_kind() -> None:
    assert sorted(list_kinds()) == [
        "anomaly_found",
        "bad_sample_found",
        "batch_changed",
        "bucket_exchanged",
        "bucket_size_chosen",
        "budget_spent",
        "checkpoint_interval_chosen",
        "checkpoint_saved",
        "checkpoint_skipped",
        "codec_changed",
        "consensus_measured",
        "data_grown",
        "data_read",
        "evaluated",
        "experts_used",
        "failed",
        "gradient_noise_measured",
        "memory_estimated",
        "memory_measured",
        "model_grown",
        "pipeline_measured",
        "plan_compared",
        "preempted",
        "readers_chosen",
        "replicas_healed",
        "resource_low",
        "resources_used",
        "restarted",
        "rolled_back",
        "run_finished",
        "run_started",
        "shares_changed",
        "showcased",
        "slow_worker",
        "staleness_measured",
        "state_copied",
        "step_finished",
        "step_timed",
        "stopped_early",
        "store_read",
        "unused_parameters",
        "warned",
        "workers_changed",
    ]


@always
@given(st.builds(Record, event=EVENTS, **strategies_of(Record)))
def test_a_record_survives_the_round_trip(record: Record) -> None:
    line = to_json(record)
    assert comparable(from_json(line)) == comparable(record)
    assert line.isascii()
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize("kind", sorted(list_kinds()))
@settings(always, max_examples=25)  # of each kind; the draws of a field are those of any other of its type
@given(data=st.data())
def test_every_kind_survives_the_round_trip(kind: str, data: st.DataObject) -> None:
    cls = list_kinds()[kind]
    record = make_record(data.draw(st.builds(cls, **strategies_of(cls))))
    assert comparable(from_json(to_json(record))) == comparable(record)
    assert json.loads(to_json(record))["kind"] == kind


def test_what_is_not_finite_is_strict_json() -> None:
    line = to_json(make_record(make_step(1, loss=math.nan, weight=math.inf, gradient_norm=-math.inf)))
    payload = json.loads(line, parse_constant=pytest.fail)["event"]
    assert (payload["loss"], payload["weight"], payload["gradient_norm"]) == ("nan", "inf", "-inf")


def test_in_settings_what_is_not_finite_becomes_its_name() -> None:
    record = make_record(make_start(settings={"clip": math.inf, "rates": [math.nan, {"low": -math.inf}]}))
    read = from_json(to_json(record)).event
    assert isinstance(read, RunStarted)
    assert read.settings == {"clip": "inf", "rates": ["nan", {"low": "-inf"}]}


def test_a_text_that_reads_like_nan_stays_a_text() -> None:
    assert from_json(to_json(make_record(Warned(message="nan")))).event == Warned(message="nan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "low"}, "step_finished: loss must be a valid number, but got 'low'"),
        ({"loss": None}, "step_finished: loss must be a valid number, but got None"),
        ({"num_samples": 1.5}, "step_finished: num_samples must be a valid integer, but got 1.5"),
        ({"num_samples": True}, "num_samples must be a valid integer, but got True"),
        ({"position": 2**63}, "position must be less than 9223372036854775808"),
        ({"loss_scale": []}, "loss_scale must be a valid number"),
    ],
)
def test_a_wrong_field_is_refused_when_the_event_is_made_and_when_it_is_read(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(EventError, match=message):
        make_step(1, **change)
    line = json.loads(to_json(make_record(make_step(1))))
    line["event"].update(change)
    with pytest.raises(EventError, match=message):
        from_json(json.dumps(line))


def test_a_wrong_envelope_is_refused() -> None:
    with pytest.raises(EventError, match="record: rank must be a valid integer, but got '0'"):
        make_record(make_step(1), rank="0")
    with pytest.raises(EventError, match="record: event must be an instance of Event, but got 'x'"):
        make_record("x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "must be JSON"),
        ('{"kind": "warned", "ru', "must be JSON"),
        ("[1]", "must be a JSON object"),
        ("[" * 100_000, "must be JSON"),
        ('{"kind": "warnd"}', r"must be a known name, but got 'warnd'; did you mean 'warned'\?"),
        ('{"kind": ["warned"]}', "must be a known name"),
        ("{}", "must be a known name"),
        ('{"kind": "warned"}', "warned must be a JSON object, but got None"),
        ('{"kind": "warned", "event": {}}', "warned: message must be given"),
        ('{"kind": "warned", "event": {"message": "a", "self": 1}}', "warned: self is not a field here"),
        ('{"kind": "warned", "event": {"__dataclass_self__": 1}}', "warned must have exactly its fields"),
        ('{"kind": "warned", "event": {"message": "a", "loud": 1}}', "warned: loud is not a field here"),
        ('{"kind": "warned", "event": {"message": "a"}, "rank": 0}', "record: run must be given\nepoch must be given"),
        ('{"kind": "warned", "event": {"message": NaN}}', "NaN is not JSON"),
    ],
)
def test_a_line_that_is_no_event_says_why(line: str, message: str) -> None:
    with pytest.raises(EventError, match=message) as caught:
        from_json(line)
    assert isinstance(caught.value, PacelineError)
    assert isinstance(caught.value, ValueError)


def test_settings_that_json_cannot_hold_are_refused() -> None:
    with pytest.raises(EventError, match="run_started must hold JSON values only"):
        to_json(make_record(make_start(settings={"shape": {1, 2}})))
    endless: dict[str, Any] = {}
    endless["self"] = endless
    with pytest.raises(EventError, match="run_started must hold JSON values only"):
        to_json(make_record(make_start(settings=endless)))


def test_events_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_step(1).loss = 3.0  # type: ignore[misc]
