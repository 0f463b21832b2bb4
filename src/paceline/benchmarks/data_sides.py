"""Sides of `bench data`, each read by a process of its own: ``python data_sides.py SIDE FOLDER BATCH STEPS SEED``.

It imports nothing of Paceline but for its own side, so that peers may be installed elsewhere.
"""

import io
import json
import random
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

SIZE, CROP, NUM_READERS = 256, 224, 2
"""Pixels of a side before and after the crop, and threads or processes that decode."""


def decode(file: bytes) -> torch.Tensor:
    """Return a random crop of an image, from -1 to 1, as all sides make it."""
    with Image.open(io.BytesIO(file)) as image:
        image.draft("RGB", (SIZE, SIZE))
        pixels = np.asarray(image.convert("RGB"))
    top, left = random.randrange(SIZE - CROP + 1), random.randrange(SIZE - CROP + 1)
    part = pixels[top : top + CROP, left : left + CROP]
    return torch.from_numpy(part.copy()).permute(2, 0, 1).contiguous().float().div_(127.5).sub_(1)


class Folder(torch.utils.data.Dataset[Any]):
    """Images of a folder."""

    def __init__(self, folder: Path) -> None:
        self._files = sorted((folder / "images").rglob("*.jpg"))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return decode(self._files[index].read_bytes()), int(self._files[index].parent.name)


def read_paceline(folder: Path, batch: int, seed: int) -> Iterator[Any]:
    """Yield batches of a `paceline.Loader` with two threads."""
    from paceline.comm.local_group import LocalGroup
    from paceline.data import Images, Loader
    from paceline.data.augment import Crop

    source = Images(path=folder / "images", size=SIZE, held_out_fraction=0.001).open().train
    options: dict[str, Any] = {
        "num_threads": NUM_READERS,
        "seed": seed,
        "prefetch": 4,
        "augment": [Crop(size=CROP, padding=0)],
    }
    yield from Loader(source, batch, group=LocalGroup.create(1)[0], **options)


def read_dataloader(folder: Path, batch: int, seed: int) -> Iterator[Any]:
    """Yield batches of torch's DataLoader with two processes, on the same folder."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.utils.data.DataLoader(
            Folder(folder), batch, shuffle=True, num_workers=NUM_READERS, generator=generator
        )


def read_webdataset(folder: Path, batch: int, seed: int) -> Iterator[Any]:
    """Yield batches of WebDataset with two processes, from tar shards."""
    import webdataset

    shards = sorted(str(path) for path in (folder / "tar").glob("*.tar"))
    dataset = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=seed).shuffle(1000).to_tuple("jpg", "cls")
    dataset = dataset.map_tuple(decode, int).repeat()
    yield from torch.utils.data.DataLoader(dataset, batch, num_workers=NUM_READERS)


def decode_sample(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Return image and label of a sample of LitData."""
    return decode(sample["image"]), sample["label"]


def read_litdata(folder: Path, batch: int, seed: int) -> Iterator[Any]:
    """Yield batches of LitData with two processes, from its own chunks."""
    import litdata

    dataset = litdata.StreamingDataset(str(folder / "chunks"), shuffle=True, seed=seed, transform=decode_sample)
    while True:
        yield from litdata.StreamingDataLoader(dataset, batch_size=batch, num_workers=NUM_READERS)


SIDES: dict[str, Callable[[Path, int, int], Iterator[Any]]] = {
    "paceline": read_paceline,
    "dataloader": read_dataloader,
    "webdataset": read_webdataset,
    "litdata": read_litdata,
}
SAMPLES_OF_SHARD = 500


def load(path: str) -> dict[str, Any]:
    """Return one image as a sample of LitData."""
    return {"image": Path(path).read_bytes(), "label": int(Path(path).parent.name)}


def write_format(side: str, folder: Path) -> None:
    """Write the images of a folder in the format of a side, if it has one of its own and it is not there."""
    files = sorted((folder / "images").rglob("*.jpg"))
    if side == "webdataset" and not (folder / "tar").exists():
        (folder / "tar").mkdir()
        random.Random(0).shuffle(files)
        for first in range(0, len(files), SAMPLES_OF_SHARD):
            with tarfile.open(folder / "tar" / f"{first:06}.tar", "w") as shard:
                for number, file in enumerate(files[first : first + SAMPLES_OF_SHARD], first):
                    for suffix, content in (("jpg", file.read_bytes()), ("cls", file.parent.name.encode())):
                        member = tarfile.TarInfo(f"{number:06}.{suffix}")
                        member.size = len(content)
                        shard.addfile(member, io.BytesIO(content))
    if side == "litdata" and not (folder / "chunks").exists():
        import litdata

        litdata.optimize(load, [str(file) for file in files], str(folder / "chunks"), chunk_bytes="64MB", num_workers=1)


def main(side: str, folder: Path, batch: int, num_steps: int, seed: int) -> None:
    """Print the samples a second of a side after its first batch, and the seconds until that, as JSON."""
    write_format(side, folder)
    random.seed(seed)
    began_s = time.perf_counter()
    batches = SIDES[side](folder, batch, seed)
    next(batches)
    first_s = time.perf_counter() - began_s
    began_s, num_samples = time.perf_counter(), 0
    for _ in range(num_steps):
        read: Any = next(batches)
        num_samples += len(read.targets if side == "paceline" else read[1])
    print(json.dumps({"samples_per_s": num_samples / (time.perf_counter() - began_s), "first_s": first_s}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6]))
