"""A profile made of what workers have measured."""

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from paceline.simulator.training import TracedShape
from paceline.simulator.training.profile import (
    Profile,
    ProfiledBlock,
    ProfiledExchange,
    ProfiledLink,
    ProfiledMachine,
    ProfiledModel,
    ProfiledProduct,
)
from paceline.topology import BytesPerSecond, Device, Loopback, Precision

_MOST_SHAPES = 8


def list_shapes(shape: TracedShape, samples: int) -> list[tuple[int, int, int]]:
    """Return rows, columns and depth of the products that take most of a model's flops."""
    flops: dict[tuple[int, int, int], float] = {}
    for product in shape.list_products():
        if product.kind == "matrix":
            lengths = (product.rows, product.columns, product.depth)
            rows, columns, depth = (round(fixed + each * samples) for fixed, each in lengths)
            key = rows, columns, depth
            flops[key] = flops.get(key, 0.0) + 2.0 * rows * columns * depth * product.count
    return sorted(flops, key=lambda key: -flops[key])[:_MOST_SHAPES]


def make_profile(
    measured: Mapping[int, Mapping[str, Any]], shape: TracedShape, num_threads: int, precision: Precision = "fp32"
) -> Profile:
    """Return the profile of what each rank measured: of what all do together, the slowest counts.

    Args:
        measured: Measurements by rank, as `measure_rank` returns them.
        shape: Trace of the model.
        num_threads: Threads of each worker.
        precision: Precision of forward.
    """
    ranks = list(measured.values())
    first = ranks[0]
    products = tuple(
        ProfiledProduct(
            rows=rows, columns=columns, depth=depth, num_threads=num_threads,
            flops_per_s=median(rank["products"][index][3] for rank in ranks),
        )
        for index, (rows, columns, depth, _) in enumerate(first["products"])
    )  # fmt: skip
    memory = median(rank["memory_bytes_per_s"] for rank in ranks)
    links = tuple(
        ProfiledLink(ranks=(int(one), int(other)), latency_s=latency_s, bytes_per_s=speed)
        for rank in ranks
        for one, other, latency_s, speed in rank["links"]
    )
    exchanges = tuple(
        ProfiledExchange(
            num_bytes=int(first["exchanges"][index][0]),
            wall_s=max(rank["exchanges"][index][1] for rank in ranks),
            cpu_s=max(rank["exchanges"][index][2] for rank in ranks),
        )
        for index in range(len(first["exchanges"]))
    )
    return Profile(
        machine=describe_machine(),
        num_workers=len(ranks),
        num_threads=num_threads,
        cluster=_make_cluster(products, memory * len(ranks), links, len(ranks)),
        products=products,
        memory_bytes_per_s=memory,
        launch_s=median(rank["launch_s"] for rank in ranks),
        links=links,
        exchanges=exchanges,
        model=_make_model(ranks, shape, precision),
    )


def describe_machine() -> ProfiledMachine:
    """Return this machine, to tell it from others."""
    processor = platform.processor() or platform.machine()
    cpus = Path("/proc/cpuinfo")
    if cpus.is_file():
        names = [line.partition(":")[2].strip() for line in cpus.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return ProfiledMachine(
        host=platform.node(),
        processor=processor,
        num_cores=len(os.sched_getaffinity(0)),
        torch=torch.__version__,
    )


def _make_model(ranks: Sequence[Mapping[str, Any]], shape: TracedShape, precision: Precision) -> ProfiledModel:
    first = ranks[0]

    def slowest(name: str) -> tuple[float, float]:
        return (max(rank[name][0] for rank in ranks), max(rank[name][1] for rank in ranks))

    return ProfiledModel(
        digest=shape.digest,
        title=shape.title,
        precision=precision,
        samples=tuple(first["samples"]),
        forward_s=slowest("forward_s"),
        backward_s=slowest("backward_s"),
        optimizer_s=max(rank["optimizer_s"] for rank in ranks),
        step_s=max(rank["step_s"] for rank in ranks),
        num_bytes=first["num_bytes"],
        blocks=tuple(ProfiledBlock(**block) for block in first["blocks"]),
    )


def _make_cluster(
    products: Sequence[ProfiledProduct], memory: float, links: Sequence[ProfiledLink], num_workers: int
) -> Loopback:
    """Return this machine with the best speeds that were measured, those of all workers together."""
    device = Device(
        peak_flops={"fp32": num_workers * max(one.flops_per_s for one in products)},
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        memory_speed=BytesPerSecond(memory),
        num_cores=len(os.sched_getaffinity(0)),
        generation="cpu",
        is_host=True,
    )
    if not links:
        return Loopback(device=device)
    return Loopback(
        device=device,
        bandwidth=BytesPerSecond(median(link.bytes_per_s for link in links)),
        latency_s=median(link.latency_s for link in links),
    )
