"""Devices: what computes, as numbers of its specification."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from paceline.errors import unknown_name
from paceline.registry import Settings
from paceline.topology.units import BytesPerSecond

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_FALLBACKS: dict[Precision, Precision] = {"fp8": "bf16", "bf16": "fp32", "fp16": "fp32", "tf32": "fp32"}


class Device(Settings):
    """Specification of a device. Speeds are dense: without the doubling of structured sparsity."""

    peak_flops: dict[Precision, Annotated[float, Field(gt=0)]]
    """Peak flop/s of matrix products by precision; fp32 must be there, and a missing one runs as the next wider."""
    memory_bytes: float = Field(gt=0)
    """Size of the device's memory."""
    memory_speed: BytesPerSecond
    """Bandwidth of the device's memory."""
    idle_w: float = Field(default=0.0, ge=0)
    """Power without work."""
    load_w: float = Field(default=0.0, ge=0)
    """Power while it computes."""
    cap_w: float | None = Field(default=None, gt=0)
    """Limit of its power; None: none below `load_w`."""
    num_cores: int = Field(default=1, ge=1)
    """Multiprocessors, or cores of a processor: a matrix product's tiles are spread over them."""
    generation: str = ""
    """Architecture, shared by devices whose efficiency is alike; empty: unlike any other."""
    is_host: bool = False
    """Whether the workers of a host share the cores and memory of this device: it is the processor of the host."""

    def divide(self, num_workers: int) -> "Device":
        """Return the part of each of `num_workers` workers on one host: a share of its processor, or a whole device."""
        if not self.is_host or num_workers == 1:
            return self
        return self.model_copy(
            update={
                "peak_flops": {precision: flops / num_workers for precision, flops in self.peak_flops.items()},
                "memory_bytes": self.memory_bytes / num_workers,
                "memory_speed": BytesPerSecond(self.memory_speed / num_workers),
                "idle_w": self.idle_w / num_workers,
                "load_w": self.load_w / num_workers,
                "cap_w": None if self.cap_w is None else self.cap_w / num_workers,
                "num_cores": max(1, self.num_cores // num_workers),
            }
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "fp32" not in self.peak_flops:
            raise ValueError(f"peak_flops must have fp32, but got {sorted(self.peak_flops)}; add it")
        if self.load_w < self.idle_w:
            raise ValueError(f"load_w must be at least idle_w = {self.idle_w}, but got {self.load_w}; raise it")
        if self.cap_w is not None and self.cap_w <= self.idle_w:
            raise ValueError(f"cap_w must be above idle_w = {self.idle_w}, but got {self.cap_w}; raise it")
        return self

    def find_precision(self, precision: Precision) -> Precision:
        """Return the precision in which it multiplies matrices of `precision`: that, or the next wider it has."""
        while precision not in self.peak_flops:
            precision = _FALLBACKS[precision]
        return precision

    @property
    def clock_share(self) -> float:
        """Clock below a power cap as a share of the full one: dynamic power grows with the clock's power of 2.5."""
        if self.cap_w is None or self.cap_w >= self.load_w:
            return 1.0
        return float(((self.cap_w - self.idle_w) / (self.load_w - self.idle_w)) ** 0.4)

    @property
    def working_w(self) -> float:
        """Power while it computes, under its cap."""
        return self.load_w if self.cap_w is None else min(self.load_w, self.cap_w)


def _gpu(
    generation: str,
    num_cores: int,
    tflops: dict[Precision, float],
    memory_gb: float,
    memory_speed: str,
    idle_w: float,
    load_w: float,
    cap_w: float | None = None,
) -> Device:
    return Device(
        generation=generation,
        num_cores=num_cores,
        peak_flops={precision: 1e12 * flops for precision, flops in tflops.items()},
        memory_bytes=memory_gb * 1e9,
        memory_speed=BytesPerSecond.parse(memory_speed),
        idle_w=idle_w,
        load_w=load_w,
        cap_w=cap_w,
    )


_V100: dict[Precision, float] = {"fp32": 15.7, "fp16": 125}
_A100: dict[Precision, float] = {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}
_H100: dict[Precision, float] = {"fp32": 67, "tf32": 494.5, "fp16": 989, "bf16": 989, "fp8": 1979}
_B200: dict[Precision, float] = {"fp32": 75, "tf32": 1125, "fp16": 2250, "bf16": 2250, "fp8": 4500}

DEVICES: dict[str, Device] = {
    # NVIDIA data sheets of each product (SXM modules); idle power as nvidia-smi shows it on idle hosts.
    "p100": _gpu("pascal", 56, {"fp32": 10.6, "fp16": 21.2}, 16, "732GB/s", 30, 300),
    "v100_16gb": _gpu("volta", 80, _V100, 16, "900GB/s", 40, 300),
    "v100_32gb": _gpu("volta", 80, _V100, 32, "900GB/s", 40, 300),
    "a100_40gb": _gpu("ampere", 108, _A100, 40, "1555GB/s", 50, 400),
    "a100_80gb": _gpu("ampere", 108, _A100, 80, "2039GB/s", 60, 400),
    "h100_80gb": _gpu("hopper", 132, _H100, 80, "3350GB/s", 75, 700),
    # PyTorch blog on Llama 3.1 at scale: H100 with 96 GB of HBM2e, limited to 500 W.
    "h100_96gb_500w": _gpu("hopper", 132, _H100, 96, "2400GB/s", 75, 700, 500),
    "h200_141gb": _gpu("hopper", 132, _H100, 141, "4800GB/s", 75, 700),
    "b200": _gpu("blackwell", 148, _B200, 180, "7700GB/s", 100, 1000),
    # Jouppi et al. 2020 (CACM 63(7)), one chip of two cores: 123 Tflop/s, 900 GB/s, 450 W with its share of the host.
    "tpu_v3": _gpu("tpu", 2, {"fp32": 4, "bf16": 123}, 32, "900GB/s", 123, 262),
    # An estimate of a common server processor: 32 cores with AVX2 at 2.5 GHz, eight channels of DDR4-3200.
    "cpu": _gpu("cpu", 32, {"fp32": 2.56}, 256, "200GB/s", 60, 205).model_copy(update={"is_host": True}),
}


def find_device(name: str) -> Device:
    """Return a device by the name of its preset.

    Raises:
        UnknownNameError: There is none.
    """
    if name not in DEVICES:
        raise unknown_name("device", name, DEVICES)
    return DEVICES[name]


def _by_name(value: Any) -> Any:
    return find_device(value) if isinstance(value, str) else value


DeviceField = Annotated[Device, BeforeValidator(_by_name)]
"""A device as a field: its specification, or the name of a preset."""


def power_of_cores(num_cores: int) -> tuple[float, float]:
    """Return the watts, idle and at work, of some cores of a server as the preset `cpu` describes one."""
    server = find_device("cpu")
    return server.idle_w * num_cores / server.num_cores, server.load_w * num_cores / server.num_cores
