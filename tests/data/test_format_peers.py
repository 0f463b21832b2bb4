"""Each way with the packages that others use: what they write is read, and what is written they read.

`make peers` installs them into an environment of their own; without it these tests are skipped.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from file_samples import make_images, write_shards

from paceline.data import FileSource
from paceline.data.formats.index import write_index
from paceline.data.formats.opening import open_place

PEERS = Path(__file__).parents[2] / ".peers"

pytestmark = pytest.mark.skipif(not PEERS.is_dir(), reason="needs the packages of others: make peers")

TORCHVISION = """
import transformers
import transformers.feature_extraction_utils
import types
for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.datasets",
             "torchvision.datasets.folder"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__getattr__ = lambda attribute: type(attribute, (), {}) if attribute[:2] != "__" else None
"""
"""Two empty classes are all that the streaming package wants of torchvision, which need not fit this torch."""
WRITE = {
    "tar": """
import webdataset
with webdataset.ShardWriter(folder + "/w-%02d.tar", maxcount=5, verbose=0) as writer:
    for sample in samples:
        writer.write({"__key__": sample["key"], "png": sample["image"], "cls": sample["label"], "json": {"n": [1]}})
""",
    "mds": TORCHVISION
    + """
from streaming import MDSWriter
columns = {"image": "bytes", "label": "int", "row": "ndarray", "text": "str", "w": "float32"}
with MDSWriter(out=folder, columns=columns, size_limit=1500) as writer:
    for number, sample in enumerate(samples):
        row = numpy.arange(number + 1, dtype=numpy.int16)
        writer.write({"image": sample["image"], "label": sample["label"], "row": row, "text": sample["key"],
                      "w": numpy.float32(0.5)})
""",
    "tfrecord": """
import tfrecord
writer = tfrecord.TFRecordWriter(folder + "/a.tfrecord")
for number, sample in enumerate(samples):
    row = list(range(-1, number))
    writer.write({"image": (sample["image"], "byte"), "label": (sample["label"], "int"), "row": (row, "int"),
                  "w": ([0.5, 1.5], "float")})
writer.close()
""",
    "hf": """
import datasets
datasets.disable_progress_bars()
rows = [{"image": {"bytes": sample["image"], "path": None}, "label": sample["label"], "key": sample["key"]}
        for sample in samples]
features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=3),
                              "key": datasets.Value("string")})
datasets.Dataset.from_list(rows, features=features).save_to_disk(folder, num_shards=2)
""",
    "parquet": """
import datasets
datasets.disable_progress_bars()
rows = [{"image": sample["image"], "label": sample["label"], "key": sample["key"]} for sample in samples]
datasets.Dataset.from_list(rows).to_parquet(folder + "/a.parquet")
""",
}
READ = {
    "tar": """
import glob
import webdataset
read = [[sample["label.cls"].decode(), sample["image.png"].hex()]
        for sample in webdataset.WebDataset(sorted(glob.glob(folder + "/*.tar")), shardshuffle=False)]
""",
    "mds": TORCHVISION
    + """
from streaming import StreamingDataset
read = [[str(sample["label"]), sample["image"].hex()]
        for sample in StreamingDataset(local=folder, shuffle=False, batch_size=1)]
""",
    "tfrecord": """
import glob
from tfrecord.reader import tfrecord_loader
read = [[str(int(sample["label"][0])), bytes(sample["image"]).hex()]
        for path in sorted(glob.glob(folder + "/*.tfrecord")) for sample in tfrecord_loader(path, None)]
""",
    "hf": """
import datasets
read = [[str(row["label"]), row["image"].hex()] for row in datasets.load_from_disk(folder)]
""",
    "parquet": """
import glob
import datasets
datasets.disable_progress_bars()
data = datasets.Dataset.from_parquet(sorted(glob.glob(folder + "/*.parquet")), cache_dir=folder + "/.cache")
read = [[str(row["label"]), row["image"].hex()] for row in data]
""",
}
START = """
import base64, json, os, sys
import numpy
folder = sys.argv[1]
samples = [{"key": sample["key"], "label": sample["label"], "image": base64.b64decode(sample["image"])}
           for sample in json.load(open(sys.argv[2]))]
"""


def run_peer(code, folder, tmp_path, samples=()):
    """Run code with the packages of others, and return what it prints last."""
    import base64

    given = [
        {"key": one["__key__"], "label": one["label"], "image": base64.b64encode(one["image"]).decode()}
        for one in samples
    ]
    (tmp_path / "samples.json").write_text(json.dumps(given))
    (tmp_path / "peer.py").write_text(START + code)
    environment = os.environ | {"PYTHONPATH": str(PEERS), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [sys.executable, tmp_path / "peer.py", folder, tmp_path / "samples.json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", WRITE)
def test_what_others_wrote_is_read(tmp_path, name):
    samples = make_images(12)
    (tmp_path / "data").mkdir()
    run_peer(WRITE[name], tmp_path / "data", tmp_path, samples)
    write_index(open_place(tmp_path / "data"), "auto")
    source = FileSource(tmp_path / "data")
    assert (source.manifest.format, len(source)) == (name, 12)
    trees = source.read_trees(np.arange(12))
    image, label = ("png", "cls") if name == "tar" else ("image", "label")
    assert [(tree[image], tree[label]) for tree in trees] == [(sample["image"], sample["label"]) for sample in samples]
    if name == "tar":
        assert trees[3]["__key__"] == "003"
        assert trees[3]["json"] == {"n": [1]}
    if name == "mds":
        assert (trees[3]["row"].tolist(), trees[3]["row"].dtype) == ([0, 1, 2, 3], np.int16)
        assert (trees[3]["text"], trees[3]["w"]) == ("003", 0.5)
    if name == "tfrecord":
        assert trees[3]["row"].tolist() == [-1, 0, 1, 2]
        assert trees[3]["w"].tolist() == [0.5, 1.5]


@pytest.mark.parametrize("name", READ)
def test_what_is_written_others_read(tmp_path, name):
    samples = [{leaf: sample[leaf] for leaf in ("__key__", "image", "label")} for sample in make_images(12)]
    write_shards(tmp_path / "data", name, samples)
    printed = run_peer(READ[name] + "\nprint(json.dumps(read))", tmp_path / "data", tmp_path)
    read = json.loads(printed.splitlines()[-1])
    assert read == [[str(sample["label"]), sample["image"].hex()] for sample in samples]
