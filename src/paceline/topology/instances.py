"""Instance types of clouds, as clusters: devices, cards and memory from the providers' pages of machine types."""

from paceline.registry import register
from paceline.topology.cluster import Host
from paceline.topology.devices import DeviceField, find_device
from paceline.topology.hosts import Count, Hosts
from paceline.topology.presets import DGX1, DGXA100, DGXB200, DGXH100
from paceline.topology.units import BytesPerSecond


@register("aws_p3_2xlarge")
class P3Small(Hosts):
    """Hosts of one V100 with up to 10 Gb/s: 8 virtual cores, 61 GiB."""

    device: DeviceField | None = find_device("v100_16gb")
    """Device of every rank: the name of a preset, or a specification."""
    host: Host = Host(num_cores=4, memory_bytes=65.5e9, idle_w=60, load_w=110)
    """Each host without its devices."""
    bandwidth: BytesPerSecond = BytesPerSecond.parse("10gbit")
    """Bandwidth of one network card, each way."""


@register("gcp_n1_standard_4_v100")
class N1Standard4(P3Small):
    """Hosts of one V100 with up to 10 Gb/s: 4 virtual cores, 15 GB."""

    host: Host = Host(num_cores=2, memory_bytes=15e9, idle_w=40, load_w=80)
    """Each host without its devices."""


@register("azure_nc6s_v3")
class NC6sV3(P3Small):
    """Hosts of one V100 with up to 10 Gb/s: 6 virtual cores, 112 GiB."""

    host: Host = Host(num_cores=3, memory_bytes=120e9, idle_w=60, load_w=110)
    """Each host without its devices."""


@register("aws_p3dn_24xlarge")
class P3dn(DGX1):
    """Hosts of 8 V100 with 100 Gb/s together."""

    nics_per_host: Count = 1
    """Network cards per host, each of `bandwidth`; device d uses card d mod nics_per_host."""


@register("aws_p4d_24xlarge")
class P4d(DGXA100):
    """Hosts of 8 A100 of 40 GB with 4 cards of 100 Gb/s."""

    device: DeviceField | None = find_device("a100_40gb")
    """Device of every rank: the name of a preset, or a specification."""
    bandwidth: BytesPerSecond = BytesPerSecond.parse("100gbit")
    """Bandwidth of one network card, each way."""
    nics_per_host: Count = 4
    """Network cards per host, each of `bandwidth`; device d uses card d mod nics_per_host."""


@register("aws_p4de_24xlarge")
class P4de(P4d):
    """Hosts of 8 A100 of 80 GB with 4 cards of 100 Gb/s."""

    device: DeviceField | None = find_device("a100_80gb")
    """Device of every rank: the name of a preset, or a specification."""


@register("gcp_a2_highgpu_8g")
class A2HighGPU(P4d):
    """Hosts of 8 A100 of 40 GB with 100 Gb/s together."""

    nics_per_host: Count = 1
    """Network cards per host, each of `bandwidth`; device d uses card d mod nics_per_host."""


@register("azure_nd96amsr_a100_v4")
class ND96amsr(DGXA100):
    """Hosts of 8 A100 of 80 GB with 8 cards of 200 Gb/s."""


@register("aws_p5_48xlarge")
class P5(DGXH100):
    """Hosts of 8 H100 with 3,200 Gb/s together."""


@register("gcp_a3_highgpu_8g")
class A3HighGPU(DGXH100):
    """Hosts of 8 H100 with 4 cards of 200 Gb/s."""

    bandwidth: BytesPerSecond = BytesPerSecond.parse("200gbit")
    """Bandwidth of one network card, each way."""
    nics_per_host: Count = 4
    """Network cards per host, each of `bandwidth`; device d uses card d mod nics_per_host."""


@register("azure_nd96isr_h100_v5")
class ND96isr(DGXH100):
    """Hosts of 8 H100 with 8 cards of 400 Gb/s."""


@register("aws_p5en_48xlarge")
class P5en(DGXH100):
    """Hosts of 8 H200 with 3,200 Gb/s together."""

    device: DeviceField | None = find_device("h200_141gb")
    """Device of every rank: the name of a preset, or a specification."""


@register("aws_p6_b200_48xlarge")
class P6B200(DGXB200):
    """Hosts of 8 B200 with 3,200 Gb/s together."""
