"""`bench data`: decoding, resuming and waiting for data, beside other loaders and data in memory."""

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from paceline.benchmarks import data_sides
from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.comm.local_group import LocalGroup
from paceline.data import Images, Loader, Source, Spec, Text
from paceline.data.orders import Indices
from paceline.errors import SettingsError
from paceline.recipes.resnet import ResNet
from paceline.recipes.transformer_lm import TransformerLM
from paceline.registry import register

Case = Literal["decode", "resume", "stall", "resnet", "language"]
_SPARE = 1.3
"""Capacity of reading, as a multiple of what the scripted training uses."""
_MOST_STALL = 0.02
_SCRIPTED_S = 0.1
"""Time that decoding a batch takes a thread where it is scripted."""
_PEERS = ("webdataset", "litdata")


@register("data")
class DataBenchmark(Benchmark):
    """Reading of data: samples a second beside other loaders, resuming, and how long training waits.

    Images are JPEG files of 256 x 256 pixels, made once and read from the page cache (warm). ``decode`` decodes and
    crops them with two threads, and with two processes of torch's DataLoader, and of WebDataset and LitData where
    `peers_python` has them; all with Pillow, each side in a process of its own, in turn. ``resume`` is the first batch
    after 9 of 10 million samples, beside that at the beginning. ``stall`` is the part of the time that a scripted
    training of sleeps waits, where reading is 1.3 times as fast: once decoding sleeps too, once it is real. The
    reference is the 2% that it should not pass.
    ``resnet`` and ``language`` are steps of a ResNet-18 and of a 12M-parameter Transformer on data that is read, beside
    the same steps on a batch in memory.
    """

    cases: tuple[Case, ...] = ("decode", "resume", "stall", "resnet", "language")
    """Parts of the benchmark."""
    num_images: int = Field(default=1500, ge=64)
    batch: int = Field(default=64, ge=1)
    """Samples of a batch."""
    num_steps: int = Field(default=20, ge=1)
    """Batches of a round."""
    num_rounds: int = Field(default=5, ge=2)
    """Rounds of each side."""
    peers_python: Path | None = None
    """Python with WebDataset and LitData; none to leave them out."""
    folder: Path | None = None
    """Folder that keeps the images for other runs; none for a temporary one."""

    def measure(self) -> list[BenchmarkRow]:
        """Time all sides in turn."""
        with tempfile.TemporaryDirectory() as temporary:
            folder = self.folder or Path(temporary)
            write_images(folder / "images", self.num_images)
            measures: dict[Case, Callable[[], list[BenchmarkRow]]] = {
                "decode": lambda: self._measure_decoding(folder),
                "resume": self._measure_resuming,
                "stall": lambda: self._measure_stall(folder),
                "resnet": lambda: [self._measure_steps("resnet", *make_resnet(folder, self.batch))],
                "language": lambda: [self._measure_steps("language", *make_language())],
            }
            return [row for case in self.cases for row in measures[case]()]

    def _measure_decoding(self, folder: Path) -> list[BenchmarkRow]:
        sides = ["paceline", "dataloader", *(_PEERS if self.peers_python is not None else ())]
        found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for number in range(-1, self.num_rounds):  # the first only fills caches
            for side in sides if number % 2 else sides[::-1]:
                result = self._start(side, folder, number + 1)
                if number >= 0:
                    found[side].append(result)
        case = f"decode and crop, {data_sides.NUM_READERS} readers, warm"
        rows = []
        for side in sides[1:]:
            for metric, unit in (("samples_per_s", "1/s"), ("first_s", "s")):
                ours, theirs = ([one[metric] for one in found[name]] for name in ("paceline", side))
                word = "samples" if metric == "samples_per_s" else "first batch"
                rows.append(BenchmarkRow.of_pairs(self.name, case, word, unit, ours, theirs, side))
        return rows

    def _start(self, side: str, folder: Path, seed: int) -> dict[str, float]:
        python = str(self.peers_python) if side in _PEERS else sys.executable
        arguments = [str(folder), str(self.batch), str(self.num_steps), str(seed)]
        done = subprocess.run(
            [python, data_sides.__file__, side, *arguments], capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode:
            raise SettingsError(
                f"peers_python must be a Python that has {side}, but it ended with: {done.stderr[-500:]}; run "
                "make data-peers"
            )
        result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return result

    def _measure_resuming(self) -> list[BenchmarkRow]:
        source = Numbers(10_000_000)
        ours: list[float] = []
        reference: list[float] = []
        for number in range(-1, self.num_rounds):
            for position, times in ((9_000_000, ours), (0, reference))[:: 1 if number % 2 else -1]:
                began_s = time.perf_counter()
                loader = make_loader(source, self.batch)
                if position:
                    loader.load_state_dict({**make_loader(source, self.batch).state_dict(), "low_water": position})
                next(iter(loader))
                if number >= 0:
                    times.append(time.perf_counter() - began_s)
        case = "10M samples in memory"
        return [BenchmarkRow.of_pairs(self.name, case, "first batch at 9M", "s", ours, reference, "at 0")]

    def _measure_stall(self, folder: Path) -> list[BenchmarkRow]:
        images = open_images(folder)
        # A mean: two threads end their steps at about the same time, so that every second one takes none.
        read_s = statistics.mean(
            time_batches(make_loader(images, self.batch, num_threads=2), 1 + 2 * self.num_steps)[1:]
        )
        scripted = Sleeping(self.num_images, _SCRIPTED_S)
        return [
            self._measure_sleeps("decoding sleeps", scripted, _SPARE * _SCRIPTED_S / 2),
            self._measure_sleeps("decodes JPEG, warm", images, _SPARE * read_s),
        ]

    def _measure_sleeps(self, name: str, source: Source, used_s: float) -> BenchmarkRow:
        shares = []
        for _ in range(self.num_rounds):
            loader = make_loader(source, self.batch, num_threads=2)
            for number, _ in enumerate(loader):
                if number == 0:
                    loader.take_read_times()  # the first batch is nobody's stall
                time.sleep(used_s)
                if number == self.num_steps:
                    break
            times = loader.take_read_times()
            shares.append(times.waited_s / (times.waited_s + times.used_s))
        case = f"{name}; training sleeps {1e3 * used_s:.3g} ms a step; slowest stage {times.slowest}"
        share = statistics.median(shares)
        return BenchmarkRow(self.name, case, "data stall", "", share, _MOST_STALL, "limit", share / _MOST_STALL)

    def _measure_steps(self, name: str, loader: Loader, step: Callable[[Any], None]) -> BenchmarkRow:
        batches = iter(loader)
        kept = next(batches)
        step(kept)
        ours: list[float] = []
        reference: list[float] = []
        for number in range(self.num_rounds):
            for is_read in (True, False) if number % 2 else (False, True):
                began_s = time.perf_counter()
                for _ in range(self.num_steps):
                    step(next(batches) if is_read else kept)
                (ours if is_read else reference).append((time.perf_counter() - began_s) / self.num_steps)
        return BenchmarkRow.of_pairs(self.name, f"{name}, training", "step", "s", ours, reference, "batch in memory")


class Numbers(Source):
    """Samples that are their own index."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def read(self, indices: Indices) -> torch.Tensor:
        """Return the indices."""
        return torch.from_numpy(indices)


class Sleeping(Numbers):
    """Samples whose decoding sleeps, so that nothing depends on the cores."""

    is_thread_safe = True

    def __init__(self, num_samples: int, decode_s: float) -> None:
        super().__init__(num_samples)
        self._decode_s = decode_s
        self.spec = Spec(input_shape=(1,))

    def decode(self, fetched: Indices, seeds: Sequence[int] | None = None) -> torch.Tensor:
        """Return the indices, later."""
        time.sleep(self._decode_s)
        return self.read(fetched)


def write_images(folder: Path, num_images: int) -> None:
    """Write smooth random images of about 20 KB in ten classes, unless they are there."""
    from PIL import Image

    if folder.exists() and sum(1 for _ in folder.rglob("*.jpg")) == num_images:
        return
    generator = np.random.default_rng(0)
    for number in range(num_images):
        place = folder / str(number % 10)
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(generator.integers(0, 256, (64, 64, 3), dtype=np.uint8))
        coarse.resize((data_sides.SIZE,) * 2, Image.Resampling.BICUBIC).save(place / f"{number}.jpg", quality=80)


def open_images(folder: Path, size: int = data_sides.SIZE) -> Source:
    """Return the images as a source."""
    source = Images(path=folder / "images", size=size, held_out_fraction=0.001).open().train
    assert isinstance(source, Source)
    return source


def make_loader(source: Source, batch: int, **options: Any) -> Loader:
    """Return a loader of one worker."""
    return Loader(source, batch, group=LocalGroup.create(1)[0], **options)


def time_batches(loader: Loader, num_steps: int) -> list[float]:
    """Return the seconds that each of some batches takes, where nobody else uses the cores."""
    times, mark_s = [], time.perf_counter()
    for _ in zip(range(num_steps), loader, strict=False):
        times.append(time.perf_counter() - mark_s)
        mark_s = time.perf_counter()
    return times


def make_resnet(folder: Path, batch: int) -> tuple[Loader, Callable[[Any], None]]:
    """Return a loader of small images that are augmented, and a step of a ResNet-18."""
    source = open_images(folder, 32)
    module = ResNet(depth=18, width=64).build(source.spec)
    loader = make_loader(source, batch, num_processes="auto", augment=["flip", "crop"])
    return loader, make_step(module, lambda batch: F.cross_entropy(module(batch.inputs), batch.targets))


def make_language() -> tuple[Loader, Callable[[Any], None]]:
    """Return a loader of text, and a step of a Transformer with 12M parameters."""
    source = Text(sequence_length=128, max_bytes=10_000_000).open().train
    assert isinstance(source, Source)
    module = TransformerLM(width=384, num_layers=7, num_heads=6).build(Spec(256, (128,)))
    assert math.isclose(sum(each.numel() for each in module.parameters()), 12e6, rel_tol=0.1)

    def compute_loss(batch: Any) -> torch.Tensor:
        return F.cross_entropy(module(batch.inputs).flatten(0, 1), batch.targets.flatten())

    return make_loader(source, 8), make_step(module, compute_loss)


def make_step(module: nn.Module, compute_loss: Callable[[Any], torch.Tensor]) -> Callable[[Any], None]:
    """Return a training step by SGD."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        compute_loss(batch).backward()
        optimizer.step()

    return step
