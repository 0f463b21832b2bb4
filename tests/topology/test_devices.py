import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.errors import SettingsError, UnknownNameError
from paceline.registry import list_variants
from paceline.topology import DEVICES, DGXA100, Cluster, Device, Loopback, Switch, find_device

always = settings(deadline=None, derandomize=True)
CLUSTERS = list_variants(Cluster)
WANTED = [
    "p100",
    "v100_16gb",
    "v100_32gb",
    "a100_40gb",
    "a100_80gb",
    "h100_80gb",
    "h100_96gb_500w",
    "h200_141gb",
    "b200",
    "tpu_v3",
    "cpu",
]


def test_every_promised_device_and_cluster_is_there():
    assert set(WANTED) <= set(DEVICES)
    assert {"dgx1", "dgx2", "dgx_a100", "dgx_h100", "dgx_b200", "tpu_v3_pod"} <= set(CLUSTERS)


def test_a_host_of_dgx_a100_has_the_published_peak_and_bandwidth():
    """2,496 Tflop/s in fp16 and 12.4 TB/s (of 40 GB devices) are the vendor's figures for eight."""
    device = find_device("a100_40gb")
    assert 8 * device.peak_flops["fp16"] == pytest.approx(2496e12)
    assert 8 * device.memory_speed == pytest.approx(12.4e12, rel=0.005)
    assert DGXA100().paths.network_bytes_per_s == pytest.approx(200e9 / 8)


@pytest.mark.parametrize("name", WANTED)
def test_a_device_survives_json_and_is_known_by_name(name):
    device = find_device(name)
    assert Device.model_validate_json(device.model_dump_json()) == device
    assert Switch.model_validate({"device": name}).device == device


def test_what_a_device_lacks_runs_in_the_next_wider_precision():
    assert find_device("v100_32gb").find_precision("bf16") == "fp32"
    assert find_device("a100_80gb").find_precision("fp8") == "bf16"
    assert find_device("h100_80gb").find_precision("fp8") == "fp8"


def test_a_cap_slows_what_is_above_it_and_nothing_else():
    device = find_device("h100_80gb")
    assert device.clock_share == 1.0
    assert device.model_copy(update={"cap_w": device.load_w}).clock_share == 1.0
    half = device.model_copy(update={"cap_w": device.idle_w + (device.load_w - device.idle_w) / 2})
    assert half.clock_share == pytest.approx(0.5**0.4)
    assert half.working_w < device.working_w


@always
@given(st.integers(1, 64))
def test_workers_of_one_host_share_its_processor_and_nothing_else(num_workers):
    cpu, gpu = find_device("cpu"), find_device("a100_80gb")
    part = cpu.divide(num_workers)
    assert num_workers * part.peak_flops["fp32"] == pytest.approx(cpu.peak_flops["fp32"])
    assert num_workers * part.memory_bytes == pytest.approx(cpu.memory_bytes)
    assert num_workers * part.load_w == pytest.approx(cpu.load_w)
    assert gpu.divide(num_workers) == gpu


def test_the_others_wait_for_the_slowest_device_of_the_hosts_in_use():
    cluster = DGXA100(host_devices={1: "v100_16gb"})
    assert cluster.device_of_slowest(8) == find_device("a100_80gb")
    assert cluster.device_of_slowest(9) == find_device("v100_16gb")
    assert Switch().device_of_slowest(4) is None
    mixed = DGXA100(host_bandwidths={0: "1gbit"})
    assert mixed.paths.network_bytes_per_s == pytest.approx(1e9 / 8)


def test_a_pods_uplink_narrows_what_a_device_gets():
    assert CLUSTERS["fat_tree"]().paths.network_bytes_per_s == pytest.approx(Switch().paths.network_bytes_per_s / 4)
    assert Loopback().paths.is_bus


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"peak_flops": {"fp16": 1e12}, "memory_bytes": 1, "memory_speed": 1}, "peak_flops must have fp32"),
        ({"peak_flops": {"fp32": 1e12}, "memory_bytes": 1, "memory_speed": 1, "idle_w": 2}, "load_w must be at least"),
        ({"peak_flops": {"fp32": 1}, "memory_bytes": 1, "memory_speed": 1, "load_w": 2, "cap_w": 0.0}, "cap_w"),
        ({"peak_flops": {"fp32": -1}, "memory_bytes": 1, "memory_speed": 1}, "greater than 0"),
    ],
)
def test_a_device_that_cannot_be_is_refused(given_, message):
    with pytest.raises(ValidationError, match=message):
        Device.model_validate(given_)


def test_an_unknown_device_lists_the_known_ones():
    with pytest.raises(UnknownNameError, match=r"a100_80gb"):
        find_device("a100")


def test_a_cluster_that_is_too_small_says_so():
    with pytest.raises(SettingsError, match="num_hosts x devices_per_host"):
        DGXA100(num_hosts=2).check_size(17)
    DGXA100(num_hosts=2).check_size(16)
