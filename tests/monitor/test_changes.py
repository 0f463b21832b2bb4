"""What a report says of a batch and a model that changed."""

from pathlib import Path

from story import make_record, make_start, make_step

from paceline.monitor import BatchChanged, GradientNoiseMeasured, ModelGrown, summarise, to_json, write_report
from paceline.monitor.formatting import describe


def noise(step, scale):
    return make_record(GradientNoiseMeasured(noise_scale=scale, trace=2.0, squared_norm=0.1, num_steps=5), step)


def test_the_report_tells_what_changed_and_forgets_what_was_undone(tmp_path: Path) -> None:
    grown = make_record(ModelGrown(num_layers=4, num_parameters=16016, method="stack"), 20)
    records = [
        make_record(make_start()),
        make_record(make_step(1), 1),
        noise(5, 20.0),
        noise(10, None),
        make_record(BatchChanged(global_batch=16, start=80), 10),
        make_record(BatchChanged(global_batch=9999, start=90), 12),
        make_record(make_start(start_step=10)),
        grown,
    ]
    changes = summarise(records).changes
    assert [record.step for record in changes] == [5, 10, 10, 20]
    (tmp_path / "events.jsonl").write_text("".join(f"{to_json(record)}\n" for record in records))
    page = write_report(tmp_path)[1].read_text()
    assert "gradient noise scale 20 samples" in page
    assert "gradient noise scale too large to be told" in page
    assert "16 samples a step, from sample 80 on" in page
    assert "4 layers with 16,016 parameters, by stack" in page
    assert "9,999 samples a step" not in page
    assert describe(grown) == "step 20: the model has grown to 4 layers, 16,016 parameters"


def test_of_many_measurements_the_newest_are_shown(tmp_path: Path) -> None:
    records = [make_record(make_start()), *(noise(step, float(step)) for step in range(1, 31))]
    (tmp_path / "events.jsonl").write_text("".join(f"{to_json(record)}\n" for record in records))
    page = write_report(tmp_path)[1].read_text()
    assert "10 earlier ones are not shown." in page
    assert "noise scale 30 samples" in page
    assert "noise scale 10 samples" not in page


def test_a_run_that_stays_as_it_is_has_no_such_section(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(f"{to_json(make_record(make_start()))}\n")
    assert "Batch and model" not in write_report(tmp_path)[1].read_text()
