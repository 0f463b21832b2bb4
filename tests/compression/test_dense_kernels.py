"""The fast kernels of 1-bit and int8 give the bits of the reference, and so does what is put in their place."""

import importlib
import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.compression import Int8, OneBit, kernels
from paceline.compression.codec import CodecContext
from paceline.compression.kernels import find_kernels
from paceline.compression.rows import RowLayout
from paceline.testing.codec_contract import make_value

CODECS = [OneBit, Int8]
NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton: pip install 'paceline[triton]'"
)


def find(compiler, codec):
    return importlib.import_module(f"paceline.compression.kernels.{compiler}_{codec.name}")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_elements=st.sampled_from((1, 7, 8, 9, 511, 512, 513, 2047, 2048, 2049, 6000)) | st.integers(1, 9000),
    num_rows=st.integers(1, 7),
    exponent=st.sampled_from((-44, -38, -30, 0, 30, 37)),
    share_of_zeros=st.sampled_from((0.0, 0.5, 1.0)),
    has_feedback=st.booleans(),
    options=st.sampled_from(({}, {"key": 2**32 - 1}, {"key": 7, "first_tile": 12345})),
    bad=st.none() | st.sampled_from((float("nan"), float("inf"), float("-inf"))),
)
@pytest.mark.parametrize("codec", CODECS)
def test_numba_gives_the_bits_of_the_reference(
    codec, num_elements, num_rows, exponent, share_of_zeros, has_feedback, options, bad
):
    rows = RowLayout(num_elements, num_rows, codec.tile, codec.bits)
    generator = torch.Generator().manual_seed(num_elements)
    value, residual, start = torch.randn(3, num_elements, generator=generator) * 10.0**exponent
    value *= torch.rand(num_elements, generator=generator) >= share_of_zeros
    if bad is not None:
        value[num_elements // 2] = bad
    results = []
    for compiler in ("torch", "numba"):
        module = find(compiler, codec)
        payload, kept, total, decoded = rows.new_payload(value.device), value.clone(), start.clone(), value.clone()
        extra = options if codec is Int8 else {}
        feedback = (residual, rows, payload, kept) if has_feedback else (None, rows, payload, None)
        is_finite = module.encode(value, *feedback, **extra)
        module.decode(payload, rows, decoded)
        module.decode(payload, rows, total, add=True)
        results.append((payload, kept, decoded, total, is_finite))
    if bad is not None:
        assert not results[0][-1]
        assert not results[1][-1]
        assert bool(results[1][2].isnan().any() or results[1][2].isinf().any())
        return
    assert results[0][-1] is results[1][-1] is True
    for expected, got in zip(results[0][:-1], results[1][:-1], strict=True):
        assert torch.equal(expected, got)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("compiler", ["torch", "numba"])
def test_an_owner_of_nothing_encodes_nothing(codec, compiler):
    rows = RowLayout(100, 3, codec.tile, codec.bits)
    payload = rows.new_payload(torch.device("cpu"), 1)
    assert find(compiler, codec).encode(torch.empty(0), torch.empty(0), rows, payload, torch.empty(0))
    assert not payload.any()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("num_elements", [1, 100, 512, 2048, 3000, 20_000])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 9])
def test_every_byte_of_a_payload_is_set(codec, num_elements, num_rows):
    rows = RowLayout(num_elements, num_rows, codec.tile, codec.bits)
    assert [rows.part(row).stop for row in range(num_rows - 1)] == [rows.part(row).start for row in range(1, num_rows)]
    assert (rows.part(0).start, rows.part(num_rows - 1).stop) == (0, num_elements)
    payloads = []
    for filling in (0, 255):
        payload = rows.new_payload(torch.device("cpu"))
        untouched = torch.full_like(payload, filling)
        num_full = num_elements // (rows.tiles_per_row * rows.tile)
        untouched[num_full:] = payload[num_full:]  # what `new_payload` promises to be zero; memory is random elsewhere
        find("numba", codec).encode(make_value((num_elements,), 0, 0), None, rows, untouched, None)
        payloads.append(untouched)
    assert torch.equal(*payloads)


@pytest.mark.parametrize("codec", CODECS)
def test_tiles_are_encoded_alike_whoever_owns_them(codec):
    value, residual = make_value((9000,), 0, 0), make_value((9000,), 1, 0)
    decoded = []
    for num_rows in (1, 2, 3, 7, 40):
        rows = RowLayout(9000, num_rows, codec.tile, codec.bits)
        payload, kept, output = rows.new_payload(value.device), torch.empty(9000), torch.empty(9000)
        find("numba", codec).encode(value, residual, rows, payload, kept)
        find("numba", codec).decode(payload, rows, output)
        decoded.append(torch.cat([output, kept]))
    assert all(torch.equal(other, decoded[0]) for other in decoded)


@pytest.mark.parametrize("codec", CODECS)
def test_rows_that_come_back_unaligned_are_understood(codec):
    value = make_value((5001,), 0, 0)
    totals = []
    for shift in (0, 1):
        running = codec(dense_below=0).exchange(value, {}, CodecContext("block", 0, 0, 1))
        request = next(running)
        for _ in range(2):
            payload = request.payload.reshape(1, -1)
            wide = torch.zeros(1, payload.shape[1] + 3, dtype=torch.uint8)
            part = wide[:, shift : shift + payload.shape[1]].copy_(payload)
            try:
                request = running.send(part)
            except StopIteration as end:
                totals.append(end.value.total)
    assert torch.equal(*totals)


@pytest.fixture
def no_compilers(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("numba", "triton") else find_spec(name)
    )
    kernels._find.cache_clear()
    yield
    kernels._find.cache_clear()


@pytest.mark.usefixtures("no_compilers")
@pytest.mark.parametrize(("device", "words"), [("cpu", "numba"), ("cuda", r"'paceline\[triton\]'")])
def test_without_a_compiler_the_reference_runs_and_says_so(device, words):
    with pytest.warns(UserWarning, match=f"'int8' runs on slow kernels .* pip install {words}"):
        assert find_kernels("int8", torch.device(device)) is find("torch", Int8)
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        find_kernels("int8", torch.device(device))


def test_other_devices_have_the_reference():
    assert find_kernels("one_bit", torch.device("meta")) is find("torch", OneBit)
    assert find_kernels("one_bit", torch.device("cpu")) is find("numba", OneBit)


INTERPRETED = """
import itertools, warnings
warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, about infinities
import torch
from paceline.compression.kernels import torch_int8, torch_one_bit, triton_int8, triton_one_bit
from paceline.compression.rows import RowLayout

def run(module, value, residual, rows, options):
    payload, kept = rows.new_payload(value.device), torch.zeros_like(value)
    feedback = (None, rows, payload, None) if residual is None else (residual, rows, payload, kept)
    is_finite = module.encode(value, *feedback, **options)
    decoded, total = torch.empty_like(value), value.nan_to_num(0)
    module.decode(payload, rows, decoded)
    module.decode(payload, rows, total, add=True)
    return is_finite, payload, kept, decoded, total

num_compared = 0
for tile, bits, reference, module, options in (
    (2048, 1, torch_one_bit, triton_one_bit, {}),
    (512, 8, torch_int8, triton_int8, {}),
    (512, 8, torch_int8, triton_int8, {"key": 4_000_000_000, "first_tile": 5}),
):
    for size, num_rows, scale, has_feedback in itertools.product((9, 5001), (1, 3), (1.0, 1e-44), (0, 1)):
        value, residual = torch.randn(2, size) * scale
        rows = RowLayout(size, num_rows, tile, bits)
        given = value, residual if has_feedback else None, rows, options
        for expected, got in zip(run(reference, *given), run(module, *given)):
            assert expected is got is True or torch.equal(expected, got), (module.__name__, size, num_rows, scale)
            num_compared += 1
        value[size // 2] = float("nan" if has_feedback else "inf")
        assert run(module, *given)[0] is False
print(num_compared)
"""


@NEEDS_TRITON
def test_interpreted_triton_gives_the_bits_of_the_reference():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment, timeout=55
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 5 * 3 * 16


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from paceline.compression.kernels import triton_int8, triton_one_bit, triton_rows

def compile(kernel, constants, **types):
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    assert "fma.rn.f32" not in made.asm["ptx"], "a fused multiplication rounds otherwise than the reference"

floats = {name: "*fp32" for name in ("value_ptr", "residual_ptr", "new_residual_ptr", "scales_ptr", "output_ptr")}
compile(triton_one_bit._encode, {"tile": 2048, "has_feedback": True}, **floats, payload_ptr="*u8", is_finite_ptr="*i32")
compile(
    triton_int8._encode, {"tile": 512, "has_feedback": True, "is_stochastic": True},
    **floats, payload_ptr="*u8", is_finite_ptr="*i32", key_ptr="*u32",
)
compile(triton_rows._decode, {"tile": 2048, "bits": 1, "add": True}, **floats, payload_ptr="*i8")
compile(triton_rows._decode, {"tile": 512, "bits": 8, "add": True}, **floats, payload_ptr="*i8")
"""


@NEEDS_TRITON
def test_triton_compiles_for_a_gpu_that_is_not_here(tmp_path: Path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, env=environment, timeout=55)
    assert done.returncode == 0, done.stderr
