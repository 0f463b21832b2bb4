"""Whatever a construction asks of its tensors, a deferred one answers as the whole one would, or is refused."""

import collections
import contextlib
import copy
import ctypes
import functools
import gc
import inspect
import io
import pickle
import queue
import sys
import threading
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from foreign_models import make_bert, make_gpt2, make_llama, make_vit
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from paceline.errors import SettingsError
from paceline.parallel import UndeferrableError, defer


class OwnParameter(nn.Parameter):
    """A parameter of a class of its own."""


def describe(tensor: Tensor) -> tuple[object, ...]:
    """Return what Python shows of a tensor."""
    return (
        *(type(tensor), tensor.__class__, type(tensor.data), tensor.data.__class__, type(tensor.detach())),
        *(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad),
        *(tensor.is_leaf, tensor.grad_fn, tensor.grad, tensor._version, tensor.is_meta, tensor.is_sparse),
        *(tensor.is_contiguous(), tensor.element_size(), tensor.nbytes, tensor.numel(), tensor.ndim, len(tensor)),
        *(tensor.is_pinned(), tensor.is_shared(), tensor.is_inference(), tensor.is_quantized, tensor.itemsize),
        *(dict(vars(tensor)), sorted(dir(tensor)), tensor._backward_hooks, tensor._is_view(), tensor._base),
    )


def find_memory(tensor: Tensor) -> tuple[object, ...]:
    storage, typed = tensor.untyped_storage(), tensor._typed_storage()
    return (
        *(storage.device, storage.device.type, storage.nbytes(), storage.size(), type(storage), storage.is_cuda),
        *(storage.element_size(), storage.is_shared(), storage.is_pinned(), len(storage), storage.get_device()),
        *(typed.device, typed.dtype, typed.size(), type(typed), storage._cdata == tensor.data.untyped_storage()._cdata),
    )


def train_a_step(module: nn.Module) -> list[object]:
    loss = module(torch.ones(4, 6)).square().sum()
    loss.backward()
    made = [type(loss.grad_fn).__name__, loss.item(), *(type(parameter.grad) for parameter in module.parameters())]
    made.append([parameter.grad.norm().item() for parameter in module.parameters() if parameter.grad is not None])
    module.zero_grad()
    return made


def call_with_others(module: nn.Module) -> float:
    return torch.func.functional_call(module[0], {"weight": torch.ones(6, 6)}, torch.ones(1, 6)).sum().item()


def add_buffer(module: nn.Module) -> list[object]:
    module.own = nn.Buffer(torch.ones(3))
    return [type(module.own), isinstance(module.own, nn.Buffer)]


def copy_bytes(module: nn.Module) -> None:
    module[0].weight.untyped_storage().copy_(torch.ones(6, 6).untyped_storage())


def swap_tensors(module: nn.Module) -> Any:
    torch.utils.swap_tensors(module[0].weight, nn.Parameter(torch.randn(6, 6)))
    return type(module[0].weight)


def give(module: nn.Module, name: str, value: object) -> None:
    setattr(module[0], name, value)


def is_reached(module: nn.Module) -> bool:
    return all(weakref.ref(parameter)() is parameter for parameter in module.parameters())


ANSWERED: dict[str, Callable[[nn.Module], object]] = {
    "type": lambda m: type(m[0].weight) is nn.Parameter,
    "exact types": lambda m: [type(p) for p in [*m.parameters(), *m.buffers()]],
    "class": lambda m: m[0].weight.__class__.__name__,
    "class of data": lambda m: m[0].weight.data.__class__ is Tensor,
    "is fake": lambda m: isinstance(m[0].weight, FakeTensor),
    "is a parameter": lambda m: (
        isinstance(m[0].weight, nn.Parameter) and not isinstance(m[1].running_mean, nn.Parameter)
    ),
    "is of a subclass": lambda m: isinstance(m[0].weight, OwnParameter),
    "subclass": lambda m: issubclass(type(m[0].weight), Tensor) and type(m[0].weight) in Tensor.__subclasses__(),
    "order of resolution": lambda m: type(m[0].weight).__mro__,
    "module of the type": lambda m: type(m[0].weight).__module__,
    "is a tensor": lambda m: torch.is_tensor(m[0].weight) and torch.is_floating_point(m[0].weight),
    "description": lambda m: [describe(tensor) for tensor in [*m.parameters(), *m.buffers()] if tensor.dim()],
    "memory": lambda m: [find_memory(tensor) for tensor in [*m.parameters(), *m.buffers()]],
    "device": lambda m: [m[0].weight.device.type, m[0].weight.get_device(), m[0].weight.is_cpu, m[0].weight.is_meta],
    "attributes": lambda m: [vars(m[0].weight), hasattr(m[0].weight, "fake_mode"), hasattr(m[0].weight, "_is_param")],
    "slots": lambda m: [name for name in dir(m[0].weight) if "fake" in name.lower()],
    "identity": lambda m: len({id(p) for p in m.parameters()}),
    "hash": lambda m: [hash(p) == id(p) for p in m.parameters()],
    "set": lambda m: [len({*m.parameters(), m[0].weight}), m[0].weight in set(m.parameters())],
    "weak references": is_reached,
    "reference count": lambda m: sys.getrefcount(m[0].weight) < 20,
    "dispatch": lambda m: [type(m[0].weight).__torch_dispatch__ is Tensor.__torch_dispatch__, str(torch.overrides)[:5]],
    "overloads": lambda m: torch.overrides.is_tensor_like(m[0].bias),
    "leaf": lambda m: [m[0].weight.is_leaf, (m[0].weight * 2).is_leaf, m[0].weight.detach().requires_grad],
    "graph": lambda m: [
        type((m[0].weight * 2).grad_fn).__name__,
        (m[0].weight + 1).grad_fn.next_functions[0][1] is None,
    ],
    "versions": lambda m: [p._version for p in [*m.parameters(), *m.buffers()]],
    "versions after writing": lambda m: [m[1].running_mean.add_(1).mul_(2)._version, m[0].weight.data.zero_()._version],
    "base": lambda m: [m[0].weight[2]._base is m[0].weight, m[0].weight.data._base, m[0].weight.T._is_view()],
    "places in memory": lambda m: [
        m[0].weight[2:].storage_offset(),
        m[0].weight.T.stride(),
        m[0].weight[:, 1].is_contiguous(),
    ],
    "same memory": lambda m: m[0].weight.is_set_to(m[0].weight.data),
    "elements": lambda m: [m[0].weight.element_size(), m[0].weight.nbytes, m[0].weight.dtype.itemsize],
    "value": lambda m: [
        m[0].weight.sum().item(),
        float(m[0].bias.data[0]),
        bool(m[0].weight.max() > 0),
        m[1].bias.tolist(),
    ],
    "text of a value": lambda m: f"{m[0].weight.sum():.4f}",
    "whole number": lambda m: [int(m[1].num_batches_tracked), [0, 1, 2][m[1].num_batches_tracked]],
    "values of a storage": lambda m: m[0].weight._typed_storage()[3] > 0,
    "iteration": lambda m: [row.sum().item() for row in m[0].weight],
    "membership": lambda m: 1.0 in m[1].weight,
    "shallow copy": lambda m: [type(copy.copy(m[0].weight)), copy.copy(m[0].weight).is_set_to(m[0].weight)],
    "deep copy": lambda m: [type(copy.deepcopy(m[0].weight)), copy.deepcopy(m[1].running_mean).device],
    "deep copy of a module": lambda m: give(m, "more", copy.deepcopy(m[1])),
    "deep copy of views": lambda m: give(m, "pair", copy.deepcopy({"a": torch.randn(6)[:3], "b": torch.randn(6)})["b"]),
    "copies of constructors": lambda m: [
        type(m[0].weight.new_empty(2)),
        type(m[0].weight.new_tensor([1.0])),
        type(torch.empty_like(m[0].weight)),
    ],
    "state": lambda m: [type(value) for value in m.state_dict().values()],
    "loaded state": lambda m: str(m.load_state_dict(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).state_dict())),
    "step of training": train_a_step,
    "converted": lambda m: [type(p) for p in m.double().float().parameters()],
    "halved": lambda m: [p.dtype for p in m[0].to(torch.bfloat16).parameters()],
    "functional call": call_with_others,
    "swapped": swap_tensors,
    "given data": lambda m: [setattr(m[0].bias, "data", torch.tensor([1.0] * 6)), type(m[0].bias)],
    "set to other memory": lambda m: [m[0].weight.data.set_(torch.ones(6, 6)), None][1],
    "replaced": lambda m: m[0].register_parameter("weight", nn.Parameter(torch.randn(6, 6).requires_grad_())),
    "tensor that learns": lambda m: give(m, "learnt", torch.randn(3, requires_grad=True)),
    "buffer with an attribute": lambda m: setattr(m[1].running_mean, "kind", "mean"),
    "torch's buffers": add_buffer,
    "other threads' own work": lambda m: ThreadPoolExecutor(1).submit(lambda: torch.ones(3).sum().item()).result(),
    "written text": lambda m: [str(m), repr(type(m[0].weight)), m[0].weight.type()],
    "pattern": lambda m: functools.singledispatch(lambda x: "other").dispatch(type(m[0].weight)) is not None,
    "source": lambda m: inspect.isclass(type(m[0].weight)) and inspect.getmodule(type(m[0].weight)).__name__,
    "members of containers": lambda m: collections.Counter(type(p).__name__ for p in m.parameters()),
    "materialised lazily": lambda m: [nn.LazyLinear(3)(torch.ones(1, 6)).shape, None][0],
}
"""Questions, whose answers are those of the whole construction."""


def change_default_dtype(module: nn.Module) -> None:
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    module.thirds = nn.Parameter(torch.arange(4) / 3)
    module.register_buffer("roots", torch.arange(8).sqrt())
    torch.set_default_dtype(kept)


def chain_operations(module: nn.Module) -> None:
    value = torch.ones(2)
    for _ in range(3000):
        value = value + 1
    module.register_buffer("chain", value)


ANSWERED["another default dtype"] = change_default_dtype
ANSWERED["long chain"] = chain_operations


def parametrise(module: nn.Module) -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            assert type(weight) is nn.Parameter
            return 2 * weight

    parametrize.register_parametrization(module[0], "weight", Double())


ANSWERED["parametrised"] = parametrise


def make(ask: Callable[[nn.Module], object]) -> nn.Module:
    """Return a model that is another one for each answer to a question."""
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    try:
        answer = repr(ask(module))
    except Exception as error:
        answer = type(error).__name__
    torch.manual_seed(zlib.crc32(answer.encode()))
    module.append(nn.Linear(6, 6))
    module.answer = answer
    return module


def compare(build: Callable[[], nn.Module]) -> None:
    """Compare a deferred construction with the whole one: structure, values, what tensors are, the generator."""
    torch.manual_seed(5)
    whole = build()
    expected_state = torch.get_rng_state()
    torch.manual_seed(5)
    module, construction = defer(build)
    assert torch.equal(torch.get_rng_state(), expected_state)
    construction.finish(module, torch.device("cpu"))
    assert getattr(module, "answer", None) == getattr(whole, "answer", None)
    assert str(module) == str(whole)
    for (name, mine), (other, theirs) in zip(list_tensors(module), list_tensors(whole), strict=True):
        assert name == other
        assert type(mine) is type(theirs), name
        assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype), name
        assert (mine.requires_grad, mine.is_leaf, mine.grad) == (theirs.requires_grad, theirs.is_leaf, None), name
        assert vars(mine) == vars(theirs), name
        assert torch.equal(mine, theirs), name
    names = [[name for name, _ in one.named_parameters()] for one in (module, whole)]
    assert names[0] == names[1]


def list_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    found = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, part in module.named_modules():
        found += [(f"{name}.{key}", value) for key, value in vars(part).items() if isinstance(value, Tensor)]
    return found


@pytest.mark.parametrize("question", ANSWERED)
def test_an_answer_is_that_of_the_whole_construction(question: str) -> None:
    compare(functools.partial(make, ANSWERED[question]))


def make_t5() -> nn.Module:
    return T5ForConditionalGeneration(T5Config(vocab_size=48, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4))


def make_mixtral() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    return MixtralForCausalLM(MixtralConfig(vocab_size=48, num_key_value_heads=2, num_local_experts=4, **sizes))


def make_whisper() -> nn.Module:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_source_positions": 10}
    tokens = {"vocab_size": 48, "pad_token_id": 0, "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2}
    return WhisperForConditionalGeneration(WhisperConfig(**sizes, **heads, **tokens))


def test_a_model_without_tensors_is_deferred() -> None:
    compare(nn.ReLU)


FOREIGN = [make_gpt2, make_bert, make_t5, make_mixtral, make_llama, make_vit, make_whisper]


@pytest.mark.parametrize("build", FOREIGN)
def test_models_of_the_transformers_library_are_those_of_the_whole_construction(build: Callable[[], nn.Module]) -> None:
    compare(build)


def save(module: nn.Module, *, new: bool) -> int:
    torch.save(module.state_dict(), file := io.BytesIO(), _use_new_zipfile_serialization=new)
    return len(file.getvalue())


def work_in_a_thread(work: Callable[[], object]) -> None:
    def catch() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=catch)
    thread.start()
    thread.join()


def share_with_a_pool_that_was_there(module: nn.Module) -> None:
    POOL.submit(nn.init.constant_, module[0].weight, 3.0).exception()


POOL = ThreadPoolExecutor(1)


def keep_running(module: nn.Module) -> None:
    wait: queue.Queue[None] = queue.Queue()
    module.wait = wait
    threading.Thread(target=wait.get, daemon=True).start()


def close_over(module: nn.Module, tensor: Tensor) -> None:
    """Keep a tensor in an attribute, and in a hook that uses it."""
    module.held = tensor
    module.register_forward_hook(lambda _module, _inputs, output: output + tensor)


def view_with_ctypes(module: nn.Module) -> float:
    storage = module[0].weight.untyped_storage()
    return ctypes.c_float.from_address(storage.data_ptr()).value


REFUSED: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "text": (lambda m: repr(m[0].weight), "makes a text"),
    "text of a list": (lambda m: str(list(m.parameters())), "makes a text"),
    "address": (lambda m: m[0].weight.data_ptr(), "address"),
    "address to read": (lambda m: m[0].weight.const_data_ptr(), "address"),
    "address of a storage": (view_with_ctypes, "address"),
    "address of a typed storage": (lambda m: m[0].weight._typed_storage().data_ptr(), "address"),
    "array": (lambda m: m[0].weight.detach().numpy().sum(), "NumPy array"),
    "array of an array": (lambda m: np.asarray(m[1].running_mean), "NumPy array"),
    "other libraries": (lambda m: np.from_dlpack(m[1].running_mean), "DLPack"),
    "capsule": (lambda m: torch.utils.dlpack.to_dlpack(m[1].running_mean), "DLPack"),
    "pickle": (lambda m: len(pickle.dumps(m[0].weight)), "address|memory past"),
    "pickled module": (lambda m: pickle.dumps(m), "address|memory past"),
    "file": (functools.partial(save, new=True), "address|memory past"),
    "older file": (functools.partial(save, new=False), "address|memory past"),
    "bytes": (lambda m: m[0].weight.untyped_storage()[0], "memory past"),
    "written bytes": (lambda m: m[0].weight.untyped_storage().fill_(0), "memory past"),
    "list of bytes": (lambda m: sum(m[0].weight.untyped_storage().tolist()), "memory past"),
    "bytes of others": (copy_bytes, "memory past"),
    "larger storage": (lambda m: m[0].weight.untyped_storage().resize_(1000), "memory past"),
    "larger tensor": (lambda m: m[1].running_mean.resize_(100), "replaces the memory"),
    "shared between processes": (lambda m: m.share_memory(), "memory past"),
    "function of each element": (lambda m: m[0].weight.data.apply_(lambda x: x + 1), "memory past"),
    "list of tensors": (lambda m: torch.tensor([m[0].weight.sum(), 1.0]), "data is not allocated yet"),
    "class of its own": (lambda m: give(m, "weight", OwnParameter(torch.ones(6, 6))), "OwnParameter of its own kind"),
    "hook on a gradient": (lambda m: m[0].weight.register_hook(lambda grad: grad * 2), "has hooks"),
    "gradient": (lambda m: m(torch.ones(4, 6)).square().sum().backward(), "has a gradient"),
    "computed attribute": (lambda m: give(m, "double", m[0].weight * 2), "computed from"),
    "attribute that is a view": (lambda m: give(m, "view", m[0].weight.data[0]), "shares memory"),
    "closure": (lambda m: close_over(m, torch.ones(6)), "in a closure"),
    "closure over a parameter": (lambda m: close_over(m, m[0].bias), "in a closure"),
    "kept storage": (lambda m: give(m, "store", m[0].weight.untyped_storage()), "in a closure"),
    "kept graph": (lambda m: give(m, "graph", (m[0].weight * m[0].weight).grad_fn), "in a closure"),
    "keys": (lambda m: give(m, "names", {m[0].weight: "weight"}), "in a closure"),
    "thread": (lambda m: work_in_a_thread(lambda: m[0].weight.data.fill_(1)), "another thread works"),
    "thread that reads": (lambda m: work_in_a_thread(lambda: m[0].weight.sum()), "another thread works"),
    "thread that draws": (lambda m: work_in_a_thread(lambda: torch.randn(3)), "another thread draws"),
    "pool": (share_with_a_pool_that_was_there, "another thread works"),
    "running thread": (keep_running, "still runs"),
    "lazy": (lambda m: m.append(nn.LazyLinear(3)), "lazy modules"),
    "conjugate": (lambda m: m.register_buffer("phase", torch.randn(4, dtype=torch.cfloat).conj()), "conjugates"),
    "negated part": (lambda m: m.register_buffer("part", torch.randn(4, dtype=torch.cfloat).conj().imag), "conjugates"),
    "resized result": (lambda m: torch.mm(m[0].weight.data, m[0].weight.data, out=torch.empty(0)), "resizes a tensor"),
    "places as a result": (lambda m: torch.nonzero(m[0].weight, out=torch.empty(0, dtype=torch.long)), "resizes"),
    "new storage": (lambda m: m[0].weight.untyped_storage().new(), "memory past"),
    "singular values": (
        lambda m: m[0].weight.data.div_(torch.linalg.svdvals(m[0].weight.data)[0]),
        "other last digits",
    ),
    "spectral norm": (lambda m: m[0].weight.data.norm("nuc"), "norm, of which torch computes other last digits"),
    "least squares": (lambda m: torch.linalg.lstsq(m[0].weight.data, m[0].bias.data[:, None]), "lstsq"),
    "eigenvalues": (lambda m: torch.linalg.eigvalsh(m[0].weight.data), "linalg_eigvalsh"),
    "without memory": (lambda m: give(m, "none", torch.empty(3, device="meta")), "no memory"),
}
"""Questions and deeds that a deferred construction refuses, even where the code catches the error."""


@pytest.mark.parametrize("question", REFUSED)
def test_what_has_no_answer_is_refused(question: str) -> None:
    ask, told = REFUSED[question]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.raises(UndeferrableError, match=told):
        defer(functools.partial(make, ask))
    assert torch.equal(torch.get_rng_state(), before)
    gc.collect()


class Cached:
    """Places that outlive a model."""

    positions: Tensor | None = None


@functools.cache
def make_positions() -> Tensor:
    return torch.arange(6).float().sin()


def keep_in_a_cache(module: nn.Module) -> None:
    module.register_buffer("positions", make_positions().clone())


def keep_in_a_class(module: nn.Module) -> None:
    Cached.positions = torch.arange(6).float()


def keep_random(module: nn.Module) -> None:
    Cached.positions = torch.randn(6)


@pytest.mark.parametrize("keep", [keep_in_a_cache, keep_in_a_class])
def test_a_tensor_that_outlives_a_refused_construction_has_its_values(keep: Callable[[nn.Module], None]) -> None:
    make_positions.cache_clear()
    try:
        with pytest.raises(UndeferrableError, match="in a closure"):
            defer(functools.partial(make, keep))
        if keep is keep_in_a_cache:
            assert torch.equal(make_positions().clone(), torch.arange(6).float().sin())
        else:
            assert Cached.positions is not None
            assert torch.equal(Cached.positions + 1, torch.arange(6) + 1.0)
    finally:
        make_positions.cache_clear()
        Cached.positions = None


def test_a_random_tensor_that_outlives_a_refused_construction_is_told() -> None:
    try:
        with pytest.raises(SettingsError, match="fill that cache before the run, or clear it"):
            defer(functools.partial(make, keep_random))
    finally:
        Cached.positions = None


def test_a_cache_that_is_filled_before_is_used() -> None:
    make_positions.cache_clear()
    make_positions()
    compare(functools.partial(make, keep_in_a_cache))
    make_positions.cache_clear()


def test_a_thread_works_on_after_a_refusal() -> None:
    goes_on, results = queue.Queue[None](), queue.Queue[Tensor]()

    def work() -> None:
        goes_on.get()
        results.put(torch.randn(3))

    def build() -> nn.Module:
        threading.Thread(target=work, daemon=True).start()
        return nn.Linear(2, 2)

    with pytest.raises(UndeferrableError, match="still runs"):
        defer(build)
    goes_on.put(None)
    assert results.get(timeout=60).shape == (3,)
