import json
import subprocess
import sys

import pytest
from steps import ROW, answer, change, read
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.cli.simulate_training import simulate_training
from paceline.errors import SettingsError
from paceline.simulator.training import answer_rows

NUMBERS = [f"{name}{end}" for name in ("step_s", "memory_bytes", "energy_j") for end in ("", "_low", "_high")]


def test_an_answer_has_every_field_of_the_contract_and_its_terms_add_up():
    found = answer(ROW)
    assert set(found) == {"id", *NUMBERS, "terms", "bound", "basis", "assumed", "error"}
    assert sum(found["terms"].values()) == pytest.approx(found["step_s"], rel=1e-9)
    assert found["bound"] == max(found["terms"], key=found["terms"].get)
    assert found["step_s_low"] < found["step_s"] < found["step_s_high"]
    assert found["memory_bytes_low"] < found["memory_bytes"] < found["memory_bytes_high"]
    # Power is less sure than time alone.
    assert found["energy_j_high"] / found["energy_j"] > found["step_s_high"] / found["step_s"]
    assert found["energy_j"] / found["energy_j_low"] == pytest.approx(found["energy_j_high"] / found["energy_j"])
    assert (found["error"], found["basis"], found["assumed"]) == (None, "published", [])
    json.dumps(found)


def test_answers_come_in_order_and_what_cannot_be_priced_has_a_reason_and_no_numbers():
    rows = [
        change(id="a"),
        change(id="b", device="a1000"),
        change(id="c", num_ranks=3),
        change(id="d", cluster={"name": "dgx_a100", "num_hosts": 1}, num_ranks=16),
        change(id="e", model={"name": "rnn"}),
        change(id="f", cluster={"name": "dgx_a100", "bandwith": "1gbit"}),
        change(id="g", sync={"name": "diloco"}),
        change({"pipeline": 16}, id="h"),
        change(id="i", model={**ROW["model"], "num_kv_heads": 3}),
    ]
    answers = answer_rows(read(*rows))["rows"]
    assert [found["id"] for found in answers] == list("abcdefghi")
    assert answers[0]["error"] is None
    wanted = ("device", "num_ranks=3", "num_hosts", "known", "bandwidth", "every_step", "number of layers", "multiple")
    for found, words in zip(answers[1:], wanted, strict=True):
        assert set(found) == {"id", "error"}
        assert words in found["error"]


def test_a_number_or_a_name_out_of_range_is_an_error_of_its_row_alone():
    rows = [
        (change(micro_batch=-1), "micro_batch must be"),
        (change(sample={"tokens": 0}), "sample.tokens must be"),
        (change(precision="fp4"), "precision must be"),
        (change(attention="flash"), "attention must be"),
        (change(recompute="some"), "recompute must be"),
        (change(pipeline={"order": "2f2b", "stages_per_rank": 1}), "pipeline.order must be"),
        (change(num_ranks=0), "num_ranks must be"),
        (change({"tensor": 7}, model={**ROW["model"], "num_heads": 48, "num_kv_heads": 48}), "48 = 7 x 6 + 6"),
        (change(optimizer="nonsense"), "optimizer must be one of adamw"),
        (change({"data": 64}, global_batch=32), "at least the number of workers, data x sharded = 64, but got 32"),
    ]
    *refused, priced = answer_rows(read(*(row for row, _ in rows), ROW))["rows"]
    for found, (_, words) in zip(refused, rows, strict=True):
        assert set(found) == {"id", "error"}
        assert words in found["error"]
    assert priced == answer(ROW)


def test_the_worker_with_most_samples_is_priced():
    of_33, of_40 = (answer(change({"data": 8}, micro_batch=1, global_batch=batch)) for batch in (33, 40))
    assert of_33["step_s"] == of_40["step_s"]


def test_every_optimizer_of_ours_is_priced_by_its_state_or_assumed():
    from paceline.optim import Optimizer
    from paceline.registry import list_variants
    from paceline.simulator.training.case import OPTIMIZERS
    from paceline.simulator.training.description import OPTIMIZER_BYTES
    from paceline.simulator.training.memory import OPTIMIZER_STATE_BYTES

    assert set(OPTIMIZERS) == set(OPTIMIZER_BYTES) == set(OPTIMIZER_STATE_BYTES)
    ours = {name for name, variant in list_variants(Optimizer).items() if variant.__module__.startswith("paceline.")}
    assert ours <= set(OPTIMIZERS)
    lean, usual = (answer(change(optimizer=name)) for name in ("adamw_8bit", "adamw"))
    assert lean["memory_bytes"] < usual["memory_bytes"]
    assert answer(change(optimizer="function"))["assumed"] == ["optimizer function, priced as adamw"]


def test_what_is_not_known_is_assumed_and_said():
    row = {"id": "r", "num_ranks": 8, "model": {"name": "decoder", "num_layers": 4, "width": 512}}
    found = answer(row)
    assert found["step_s"] > 0
    for name in ("model.num_heads", "device", "cluster", "precision", "micro_batch", "global_batch", "layout.data"):
        assert name in found["assumed"]
    known = answer(change(micro_batch=None))
    assert known["assumed"] == ["micro_batch"]
    assert answer(change(device="v100_32gb"))["assumed"] == ["precision fp32, as the device lacks bf16"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"version": 2, "rows": []}, "version of rows must be 1"),
        ({"version": True, "rows": []}, "version of rows must be 1"),
        ({"rows": []}, "version"),
        ([], "version"),
        ({"version": 1, "rows": {}}, "must be a list"),
        ({"version": 1, "rows": [{**ROW, "colour": 1}]}, r"row 0 of rows, r1: colour is not a field"),
        ({"version": 1, "rows": [{**ROW, "num_ranks": "8"}]}, "num_ranks must be"),
        ({"version": 1, "rows": [{**ROW, "layout": {"tensors": 2}}]}, "layout.tensors is not a field"),
        ({"version": 1, "rows": [{**ROW, "measured": {"step_s": 1.0}}]}, "must not have measured"),
        ({"version": 1, "rows": [{"id": "x", "model": {}}]}, "num_ranks must be given"),
    ],
)
def test_a_document_in_another_form_is_refused(document, message):
    from paceline.simulator.training import read_rows

    with pytest.raises(SettingsError, match=message):
        read_rows(document, "rows", measured=False)


def test_measured_rows_must_be_measured_and_priced():
    with pytest.raises(SettingsError, match="must have measured"):
        answer(ROW, [ROW])
    with pytest.raises(SettingsError, match="measured row r1 cannot be priced"):
        answer(ROW, [change(device="none", measured={"step_s": 1.0})])


def test_measurements_correct_the_answer_and_narrow_its_interval():
    cold = answer(ROW)
    slow = [change(id="m", global_batch=64, measured={"step_s": 4 * cold["step_s"], "memory_bytes": 20e9})]
    warm = answer(ROW, slow)
    assert warm["basis"] == "calibrated"
    assert 1.1 * cold["step_s"] < warm["step_s"] <= 2.2 * cold["step_s"]
    assert warm["step_s_high"] / warm["step_s_low"] < cold["step_s_high"] / cold["step_s_low"]
    assert abs(warm["memory_bytes"] / 20e9 - 1) < abs(cold["memory_bytes"] / 20e9 - 1)
    near = answer(ROW, [change(id="m", measured={"step_s": 1.05 * cold["step_s"]})])
    assert near["step_s"] == pytest.approx(1.05 * cold["step_s"], rel=0.02)


def test_an_answer_depends_on_nothing_but_its_row():
    rows = read(change(id="a"), change(id="b", precision="fp32"))
    together = answer_rows(rows)["rows"]
    assert together[0]["step_s"] == pytest.approx(answer_rows(rows[:1])["rows"][0]["step_s"], rel=1e-12)
    assert together[1]["step_s"] == pytest.approx(answer(change(id="b", precision="fp32"))["step_s"], rel=1e-12)


def test_unknown_hardware_is_said_and_has_a_wider_interval():
    known = answer(ROW)
    device = {"peak_flops": {"fp32": 2e13, "bf16": 3e14}, "memory_bytes": 8e10, "memory_speed": 2e12, "num_cores": 108}
    found = answer(change(device=device))
    assert found["basis"] == "specification"
    assert found["step_s_high"] / found["step_s_low"] > 1.2 * known["step_s_high"] / known["step_s_low"]


def test_the_command_reads_rows_and_writes_answers(tmp_path):
    spec, measured, out = tmp_path / "in.json", tmp_path / "m.json", tmp_path / "out.json"
    spec.write_text(json.dumps({"version": 1, "rows": [change(id="a"), change(id="b", device="none")]}))
    measured.write_text(json.dumps({"version": 1, "rows": [change(id="m", measured={"step_s": 1.0})]}))
    arguments = ["simulate", "training", "--spec", spec, "--calibrate", measured, "--json", out]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert (written["version"], [row["id"] for row in written["rows"]]) == (1, ["a", "b"])
    assert written["rows"][0]["basis"] == "calibrated"
    assert "b cannot be priced: device must be a known name" in result.output


def test_the_command_refuses_what_it_cannot_read(tmp_path):
    with pytest.raises(SettingsError, match="--spec must be given"):
        simulate_training(None, None, None)
    with pytest.raises(SettingsError, match="--spec must be a file that can be read"):
        simulate_training(tmp_path / "none.json", None, None)
    result = CliRunner().invoke(app, ["simulate", "all-reduce", "--spec", str(tmp_path)])
    assert "--spec, --calibrate and --profile must be with training" in str(result.exception)


def test_pricing_steps_needs_no_torch():
    code = (
        "import sys; import paceline.simulator.training as t; import paceline.cli.simulate_training\n"
        "t.answer_rows([]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
