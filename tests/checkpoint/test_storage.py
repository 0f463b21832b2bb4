import json
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from paceline.checkpoint import Checkpoint, CheckpointStore, SafetensorsWriter
from paceline.checkpoint.manifest import DTYPES
from paceline.checkpoint.storage import save_tensors
from paceline.errors import CheckpointError

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def random_tensor(dtype, shape, seed=0):
    """Any bit pattern of the dtype, NaNs with payloads too (bool has two)."""
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        content %= 2
    return content.view(dtype).view(shape)


def as_bytes(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def round_trip(directory, tensors, **options):
    directory.mkdir()
    save_tensors(tensors, SafetensorsWriter(directory, b"{}", step=1, **options), None)
    checkpoint = Checkpoint.open(directory)
    checkpoint.verify()
    loaded = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    checkpoint.load(loaded)
    return loaded


@given(
    kinds=st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES, st.integers(0, 99)), max_size=6),
    max_file_bytes=st.sampled_from([1, 64, 2**30]),
)
@settings(max_examples=60, deadline=None)
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path_factory, kinds, max_file_bytes):
    tensors = {name: random_tensor(DTYPES[dtype], shape, seed) for name, (dtype, shape, seed) in kinds.items()}
    directory = tmp_path_factory.mktemp("round") / "trip"
    loaded = round_trip(directory, tensors, max_file_bytes=max_file_bytes)
    assert {name: as_bytes(tensor) for name, tensor in loaded.items()} == {
        name: as_bytes(tensor) for name, tensor in tensors.items()
    }
    checkpoint = Checkpoint.open(directory)
    assert all(as_bytes(checkpoint.read(name)) == as_bytes(tensor) for name, tensor in tensors.items())
    specs = checkpoint.list_tensors()
    assert specs == {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def test_the_safetensors_library_reads_every_file(tmp_path):
    tensors = {dtype: random_tensor(DTYPES[dtype], (3, 5)) for dtype in DTYPES}
    tensors |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(3.5), "__metadata__": torch.ones(2)}
    round_trip(tmp_path / "c", tensors, max_file_bytes=200)
    files = sorted((tmp_path / "c").glob("*.safetensors"))
    assert len(files) > 2
    read = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            read |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    assert "__metadata__" not in read
    read["__metadata__"] = read.pop("__metadata__'")
    assert {name: (t.dtype, t.shape, as_bytes(t)) for name, t in read.items()} == {
        name: (t.dtype, t.shape, as_bytes(t)) for name, t in tensors.items()
    }


def test_views_strides_and_shared_memory_are_saved_by_their_values(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        "base": base,
        "tied": base,
        "row": base[1],
        "column": base[:, 2],
        "transposed": base.T,
        "every_second": base.view(-1)[::2],
        "expanded": torch.tensor(7.0).expand(3, 2),
        "parameter": torch.nn.Parameter(base * 2),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugated": torch.view_as_complex(base.view(12, 2)).conj(),
        "negated": torch.view_as_complex(base.view(12, 2)).conj().imag,
    }
    for name, tensor in round_trip(tmp_path / "c", tensors).items():
        assert torch.equal(tensor, tensors[name]), name


def test_loading_fills_views_and_parameters_in_place(tmp_path):
    round_trip(tmp_path / "c", {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)})
    home = torch.zeros(3, 2)
    parameter = torch.nn.Parameter(torch.zeros(4))
    Checkpoint.open(tmp_path / "c").load({"a": home.T, "b": parameter})
    assert torch.equal(home, torch.arange(6.0).view(2, 3).T)
    assert torch.equal(parameter, torch.ones(4))
    assert parameter.requires_grad


def test_pieces_smaller_than_a_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.checkpoint.tensor_file.BUFFER_BYTES", 64)
    monkeypatch.setattr("paceline.checkpoint.checkpoint.BUFFER_BYTES", 24)
    tensors = {"a": torch.randn(1001), "b": torch.randn(7, 11).bfloat16()}
    for name, tensor in round_trip(tmp_path / "c", tensors).items():
        assert torch.equal(tensor, tensors[name])


def test_files_are_split_at_the_size_given(tmp_path):
    tensors = {f"t{index}": torch.randn(25) for index in range(10)} | {"large": torch.randn(200)}
    round_trip(tmp_path / "c", tensors, max_file_bytes=400)
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    payloads = [file["num_bytes"] - file["header_bytes"] for file in manifest["files"]]
    assert sum(payloads) == 10 * 100 + 800
    assert sorted(payloads)[-1] == 800  # alone in its file
    assert max(sorted(payloads)[:-1]) == 400


def test_every_tensor_is_aligned_in_its_file(tmp_path):
    tensors = {f"{index}{dtype}": random_tensor(DTYPES[dtype], (3,)) for index, dtype in enumerate(DTYPES)}
    round_trip(tmp_path / "c", tensors)
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    for tensor in manifest["tensors"].values():
        assert tensor["chunks"][0]["start"] % DTYPES[tensor["dtype"]].itemsize == 0


def test_nothing_is_pickled(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("pickled")

    for place in (pickle, torch):
        for name in ("dump", "dumps", "load", "loads", "save", "Pickler", "Unpickler"):
            if hasattr(place, name):
                monkeypatch.setattr(place, name, refuse)
    tensors = {"a": torch.randn(5)}
    saved = CheckpointStore(tmp_path).save(tensors, {"b": [1, 2.5, None]}, step=3)
    loaded = {"a": torch.empty(5)}
    checkpoint = Checkpoint.open(saved.path)
    checkpoint.load(loaded)
    assert checkpoint.read_document() == {"b": [1, 2.5, None]}
    assert torch.equal(loaded["a"], tensors["a"])
    for file in saved.path.iterdir():
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                assert list(opened.keys()) == ["a"]
        else:
            assert isinstance(json.loads(file.read_text()), dict)


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse()], ids=["complex128", "sparse"]
)
def test_a_tensor_that_cannot_be_stored_is_refused_by_name(tmp_path, tensor):
    with pytest.raises(CheckpointError, match=r"tensor 'odd' must be dense and of a dtype that safetensors knows"):
        CheckpointStore(tmp_path).save({"odd": tensor}, {}, step=1)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_document_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"document must be plain JSON, but .*Tensor"):
        CheckpointStore(tmp_path).save({}, {"loss": torch.ones(1)}, step=1)
    assert not list(tmp_path.iterdir())


class TestWhatIsLoadedMustFit:
    @pytest.fixture
    def checkpoint(self, tmp_path):
        return Checkpoint.open(CheckpointStore(tmp_path).save({"a": torch.ones(2, 3), "b": torch.ones(1)}, {}, 1).path)

    def test_missing_name(self, checkpoint):
        into = {"a": torch.zeros(2, 3), "b": torch.zeros(1), "c": torch.zeros(1)}
        for strict in (True, False):
            with pytest.raises(CheckpointError, match=r"'c' is not in it"):
                checkpoint.load(into, strict=strict)
        assert not into["a"].any()

    def test_unexpected_name(self, checkpoint):
        into = {"a": torch.zeros(2, 3)}
        with pytest.raises(CheckpointError, match=r"'b' is in it but not here"):
            checkpoint.load(into)
        assert not into["a"].any()
        checkpoint.load(into, strict=False)
        assert into["a"].all()

    def test_shape_and_dtype(self, checkpoint):
        into = {"a": torch.zeros(3, 2), "b": torch.zeros(1, dtype=torch.float64)}
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(into)
        assert "'a' has shape (2, 3) in it and (3, 2) here" in str(caught.value)
        assert "'b' is torch.float32 in it and torch.float64 here" in str(caught.value)

    def test_many_problems_are_counted(self, checkpoint):
        with pytest.raises(CheckpointError, match=r"and 97 more; "):
            checkpoint.load({f"x{index}": torch.zeros(1) for index in range(100)})
