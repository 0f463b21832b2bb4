"""Peaks of published configurations and accelerators, from the specifications of our presets."""

from paceline.benchmarks.reproductions.predicted import PredictedRow, PredictedTable, counted
from paceline.registry import register
from paceline.topology import DEVICES, DGXA100, Device
from paceline.topology.presets import DGX2


@register("configurations")
class Configurations(PredictedTable):
    """Peak flop/s, memory bandwidth and power of DGX A100, DGX-2H, a SuperPOD, and of accelerators.

    All of it is arithmetic on specifications: nothing is predicted.
    """

    def reproduce(self) -> list[PredictedRow]:
        """Add them up."""
        a100, v100 = DEVICES["a100_40gb"], DEVICES["v100_32gb"]
        rows = _sum_up("DGX A100", 8, a100, DGXA100().host.load_w, (2496, 12.4, 6500))
        rows += _sum_up("DGX-2H", 16, v100, DGX2().host.load_w, (2000, 14.4, 10000))
        rows += _sum_up("SuperPOD of 1,024 A100", 1024, a100, 128 * DGXA100().host.load_w, (319488, 1587.2, 832000))
        tpu = DEVICES["tpu_v3"]
        return [
            *rows,
            counted("A100: fp16 Tflop/s", a100.peak_flops["fp16"] / 1e12, "312"),
            counted("A100: memory, TB/s", a100.memory_speed / 1e12, "1.6", "1.555 of the 40 GB A100, rounded"),
            counted(
                "TPU v3, one chip: bf16 Tflop/s",
                tpu.peak_flops["bf16"] / 1e12,
                "420",
                "420 is of a board of four chips, 105 each; the chip's own paper says 123",
            ),
            counted(
                "TPU v3, one chip: memory, GB/s", tpu.memory_speed / 1e9, "900", "of one chip, beside a board's flop/s"
            ),
        ]


def _sum_up(
    name: str, number: int, device: Device, hosts_w: float, published: tuple[float, float, float]
) -> list[PredictedRow]:
    flops, speed, power = published
    ours_w = number * device.load_w + hosts_w
    ours_speed = number * device.memory_speed / 1e12
    note = f"the data sheet's most of a whole system; our presets add up to {ours_w / power:.0%} of it"
    is_dgx_2h = name == "DGX-2H"
    if is_dgx_2h:
        note = "10,000 W is of DGX-2's data sheet, whose devices take 300 W; DGX-2H has faster ones and 12,000 W"
    return [
        counted(f"{name}: fp16 Tflop/s", number * device.peak_flops["fp16"] / 1e12, f"{flops:,}"),
        counted(f"{name}: memory, TB/s", ours_speed, f"{speed:,}"),
        counted(
            f"{name}: most W", ours_w, f"{power:,.0f}", "" if abs(ours_w / power - 1) < 0.01 and not is_dgx_2h else note
        ),
    ]
