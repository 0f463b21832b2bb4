"""Metering of what workers use: increments that add up, where they come from, and how rarely they are read."""

from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from paceline.comm import LocalGroup
from paceline.monitor import EventLog, ResourcesUsed, StepFinished, read_log, select, summarise
from paceline.monitor.energy import NvmlMeter
from paceline.monitor.energy.nvml import NvmlError
from paceline.monitor.usage import describe_usage, sum_usage
from paceline.planner.limits import describe_this_machine
from paceline.topology import Host, Site, find_device
from paceline.topology.tables import read_shipped
from paceline.training import usage
from paceline.training.budget import Budget, BudgetGuard, Spent
from paceline.training.usage import LOG_INTERVAL_S, UsageMeter, find_meters
from plain_functions import make_points_run, train_here

CPU = torch.device("cpu")


class Scripted:
    interval_s = None

    def __init__(self, part, clock, power_w):
        self.part, self.clock, self.power_w, self.num_reads = part, clock, power_w, 0
        self.source = f"scripted {part}"

    def read_j(self):
        self.num_reads += 1
        return self.power_w * self.clock.now_s


@pytest.fixture
def clock():
    return SimpleNamespace(now_s=0.0)


def make_meter(clock, site=None, share=0.5, unknown=None):
    meters = [Scripted("gpu", clock, 200), Scripted("cpu", clock, 50)]
    given = site or Site(price_per_hour=7.2, kg_co2e_per_kwh=0.5, pue=1.2)
    return UsageMeter(given, meters, share, unknown, lambda: clock.now_s), meters


def test_increments_add_up_to_energy_carbon_and_money(clock):
    meter, _ = make_meter(clock)
    taken = []
    for seconds in (3.0, 10.0, 3600.0):
        clock.now_s = seconds
        taken.append(meter.take())
    assert [event.duration_s for event in taken] == [3.0, 7.0, 3590.0]
    assert taken[1].energy_of == {"gpu": 1400.0, "cpu": 350.0}
    assert sum(event.energy_j for event in taken) == 250 * 3600
    assert sum(event.carbon_kg for event in taken) == pytest.approx(0.25 * 1.2 * 0.5)
    assert sum(event.money for event in taken) == pytest.approx(7.2 / 2)
    assert meter.read_total() == (3600.0, 250 * 3600.0, pytest.approx(3.6))
    assert taken[0].price == "7.2 usd an hour a host (as given)"


def test_tables_are_read_when_a_run_starts_and_not_again(clock, tmp_path):
    for name in ("prices", "grid", "pue"):
        (tmp_path / f"{name}.csv").write_text(read_shipped(name))
    site = Site(
        instance="aws_p4d_24xlarge",
        prices=str(tmp_path / "prices.csv"),
        grid=str(tmp_path / "grid.csv"),
        overheads=str(tmp_path / "pue.csv"),
    )
    meter, _ = make_meter(clock, site, share=1.0)
    guard = BudgetGuard(Budget(money=40), site, Spent(), meter.read_total, lambda: clock.now_s)
    guard.begin(0, LocalGroup())
    for name in ("prices", "grid", "pue"):
        (tmp_path / f"{name}.csv").unlink()
    clock.now_s = 3600.0
    event = meter.take()
    assert (event.money, event.currency) == (pytest.approx(32.77), "usd")
    assert event.carbon_kg == pytest.approx(0.25 * 0.475)
    assert guard.check(1, 10, LocalGroup()).unit == "usd"


def test_without_a_price_there_is_no_money_and_what_is_unknown_is_told(clock, tmp_path):
    meter, _ = make_meter(clock, Site(), unknown={"memory": "unknown: nothing measures it"})
    with EventLog(tmp_path / "events.jsonl", run="r", rank=0) as log, meter.logging_to(log, lambda: 3):
        clock.now_s = 2.0
    (record,) = select(read_log(tmp_path / "events.jsonl"), ResourcesUsed)
    assert (record.step, record.event.energy_j, record.event.money) == (3, 500.0, None)
    lines = list(describe_usage(summarise([record])))
    assert [line.partition(":")[0] for line in lines] == ["energy", "carbon"]
    assert "at least 500 J = 0.0001389 kWh, 250 W on average over 2 s" in lines[0]
    assert "gpu scripted gpu; cpu scripted cpu; memory unknown: nothing measures it" in lines[0]


def test_a_meter_is_read_every_few_seconds_and_not_every_step(clock, tmp_path):
    """So that its cost does not grow with the number of steps."""
    meter, meters = make_meter(clock)
    with EventLog(tmp_path / "events.jsonl", run="r", rank=0) as log:
        meter.logging_to(log, lambda: 0)
        for _ in range(2000):
            clock.now_s += 0.01
            meter.write_if_due()
    assert all(20 / LOG_INTERVAL_S - 1 <= one.num_reads <= 20 / LOG_INTERVAL_S for one in meters)


def test_a_host_is_counted_by_its_first_worker_alone(monkeypatch):
    counters = [SimpleNamespace(part="cpu"), SimpleNamespace(part="memory")]
    monkeypatch.setattr(usage, "find_rapl", lambda: counters)
    assert find_meters(Site(), CPU, 0, 2) == (counters, {})
    assert find_meters(Site(), CPU, 1, 2) == ([], {})
    monkeypatch.setattr(usage, "find_rapl", lambda: counters[1:])
    (meter,), _ = find_meters(Site(), CPU, 1, 2)
    assert meter.source.startswith("declared"), "memory alone is not the host"
    assert find_meters(Site(measures_energy=False), CPU, 0, 1) == ([], {})


def test_power_is_declared_by_the_site_or_as_part_of_a_server(monkeypatch):
    monkeypatch.setattr(usage, "find_rapl", list)
    monkeypatch.setattr(usage.os, "sched_getaffinity", lambda _: range(8))

    def declare(site, num_here=2):
        (meter,), _ = find_meters(site, CPU, 0, num_here)
        return meter.source

    assert "7.5 W idle and 4.53 W for a core at work (8 cores' part of a server of 32" in declare(Site())
    host = Host(num_cores=10, idle_w=100, load_w=300)
    assert "25 W idle and 20 W for a core at work (site.host)" in declare(Site(host=host), 4)
    device = find_device("cpu").model_copy(update={"idle_w": 10.0, "load_w": 42.0, "num_cores": 16})
    assert "10 W idle and 2 W for a core at work (site.device)" in declare(Site(device=device), 1)
    assert "(hosts of aws_p5_48xlarge)" in declare(Site(instance="aws_p5_48xlarge"))


def test_a_gpu_is_measured_or_declared_or_unknown(monkeypatch):
    monkeypatch.setattr(usage, "find_rapl", list)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1234"))
    monkeypatch.setattr(usage, "Nvml", lambda: "library")
    opened = []
    monkeypatch.setattr(usage, "NvmlMeter", lambda *of: opened.append(of) or SimpleNamespace(part="gpu"))
    gpu = torch.device("cuda", 1)
    assert [meter.part for meter in find_meters(Site(), gpu, 0, 8)[0]] == ["gpu", "cpu"]
    assert opened == [("library", "GPU-1234")]

    def fail(*_):
        raise NvmlError("no driver")

    monkeypatch.setattr(usage, "NvmlMeter", fail)
    meters, unknown = find_meters(Site(), gpu, 0, 8)
    assert (meters[0].source, unknown) == (
        "declared, not measured: 400 W all the time (of NVIDIA A100-SXM4-40GB)",
        {},
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Abacus 9")
    meters, unknown = find_meters(Site(), gpu, 0, 8)
    assert [meter.part for meter in meters] == ["cpu"]
    assert unknown == {"gpu": "unknown: nothing measures it, and no power is declared for Abacus 9; give site.device"}
    assert NvmlMeter.part == "gpu"


def test_each_worker_of_a_run_says_what_it_used_and_workers_of_a_host_share_its_price(tmp_path):
    run = make_points_run(num_steps=3, site={"price_per_hour": 3600, "measures_energy": True})
    train_here(run, tmp_path, 2)
    records = read_log(tmp_path / "events.jsonl")
    used = select(records, ResourcesUsed)
    assert {record.rank for record in used} == {0, 1}
    total = sum_usage(records)
    assert total.money == pytest.approx(total.worker_s / 2, rel=1e-9), "1 usd a second for the host"
    assert total.energy_j > 0
    assert any("declared" in source or "RAPL" in source for source in total.sources["cpu"])
    steps = select(records, StepFinished)
    cost = list(describe_usage(summarise(records)))[-1]
    assert cost.startswith("cost: ")
    assert "3600 usd an hour a host (as given), while workers train" in cost
    assert steps


def test_old_prices_are_warned_of_at_the_start(tmp_path):
    train_here(make_points_run(num_steps=1, site={"instance": "aws_p3_2xlarge"}), tmp_path, 1)
    log = (tmp_path / "events.jsonl").read_text()
    assert "the price of aws_p3_2xlarge in us-east-1 is" in log
    assert "(--site.prices mine.csv)" in log


def test_a_budget_needs_something_to_count():
    with pytest.raises(ValidationError, match=r"budget.money must come with a price of hosts, but there is none; give"):
        make_points_run(budget={"money": 5})
    with pytest.raises(ValidationError, match=r"site.measures_energy must be true with budget.energy"):
        make_points_run(budget={"energy": "5kWh"}, site={"measures_energy": False})
    for budget in ({"money": 0}, {"hours": -1}, {"energy": "5"}, {"energy": 0}):
        with pytest.raises(ValueError, match=r"greater than 0|an energy must be like"):
            make_points_run(budget=budget, site={"price_per_hour": 1})


def test_a_plan_for_this_machine_and_a_run_on_it_declare_the_same_power(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device = describe_this_machine().device
    meter = usage._declare_processor(Site(), 1, is_device=True)
    at_work = meter._idle_w + meter._core_w * device.num_cores
    assert (meter._idle_w, at_work) == pytest.approx((device.idle_w, device.load_w))
