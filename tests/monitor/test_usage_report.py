"""Energy and cost of a run in its report, with units and assumptions, and while it trains."""

from pathlib import Path

from rich.console import Console
from story import make_record, make_start, make_step

from paceline.monitor import LiveView, ResourcesUsed, summarise, to_json, write_report
from paceline.monitor.usage import describe_usage, energy, render_usage, sum_usage

MEASURED = "measured by NVML (counter)"
DECLARED = "declared, not measured: 10 W idle"


def used(step: int, rank: int = 0, money: float | None = 0.5, **changes):
    event = ResourcesUsed(
        duration_s=100.0,
        energy_j=18_000.0,
        energy_of={"gpu": 15_000.0, "cpu": 3_000.0},
        sources={"gpu": MEASURED, "cpu": DECLARED},
        carbon_kg=0.0025,
        carbon_by="0.475 kgCO2e/kWh (world, 2018; IEA), PUE 1.05 (as given)",
        money=money,
        currency="" if money is None else "usd",
        price="" if money is None else "36 usd an hour a host (as given)",
    )
    return make_record(event, step, rank=rank, **changes)


def tell(**changes):
    steps = [make_record(make_step(step), step) for step in range(1, 11)]
    return [
        make_record(make_start()),
        *steps,
        used(5, **changes),
        used(5, rank=1, **changes),
        make_record(make_start(start_step=5), 5, epoch=1),
        used(10, epoch=1, **changes),
        used(10, rank=1, epoch=1, **changes),
    ]


def test_what_workers_and_attempts_have_used_is_summed_undone_steps_too():
    usage = sum_usage(tell())
    assert (usage.duration_s, usage.worker_s) == (200.0, 400.0)
    assert (usage.energy_j, usage.carbon_kg, usage.money) == (72_000.0, 0.01, 2.0)
    assert usage.energy_of == {"gpu": 60_000.0, "cpu": 12_000.0}
    assert usage.sources == {"gpu": [MEASURED], "cpu": [DECLARED]}


def test_each_line_has_units_and_assumptions():
    lines = list(describe_usage(summarise(tell())))  # five steps of 64 samples count
    assert lines == [
        f"energy: 72 kJ = 0.02 kWh, 360 W on average over 3 min 20 s, 225 J a sample; gpu {MEASURED}; cpu {DECLARED}",
        "carbon: 0.01 kgCO2e, 31.25 mg a sample; 0.475 kgCO2e/kWh (world, 2018; IEA), PUE 1.05 (as given)",
        "cost: 2 usd, 6,250 usd for 1,000,000 samples, 62.5 usd an epoch of 10,000; "
        "36 usd an hour a host (as given), while workers train",
    ]
    assert [line.partition(":")[0] for line in describe_usage(summarise(tell(money=None)))] == ["energy", "carbon"]
    assert list(describe_usage(summarise([]))) == []


def test_the_report_has_a_section_and_tiles(tmp_path: Path):
    (tmp_path / "events.jsonl").write_text("".join(f"{to_json(record)}\n" for record in tell()))
    _, page = write_report(tmp_path)
    text = page.read_text()
    for words in ("<h2>Energy and cost</h2>", "<dd>0.02 kWh<small>declared in part", "<dd>2 usd<small>36 usd an hour"):
        assert words in text
    assert render_usage(summarise([])) == ""


def test_energy_and_money_are_shown_while_it_trains():
    console = Console(width=150, force_terminal=True, record=True)
    view = LiveView(console)
    for record in (make_record(make_start()), make_record(make_step(1), 1), used(1), used(1, rank=1)):
        view.show(record)
    with console.capture() as shown:
        console.print(view._status)
    view.close()
    assert "0.01 kWh   1 usd" in shown.get()


def test_energies_have_a_unit_of_their_size():
    assert [energy(value) for value in (0.5, 4500, 3.6e6, 7.2e9)] == [
        "0.5 J = 1.389e-07 kWh",
        "4.5 kJ = 0.00125 kWh",
        "3.6 MJ = 1 kWh",
        "7.2 GJ = 2,000 kWh",
    ]
