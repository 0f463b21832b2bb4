import ast
import collections
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

import paceline

ROOT = Path(__file__).parents[1]
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
LAYERS = [line.split(" : ") for line in LINTER[0]["layers"] if not line.startswith("_")]
"""Layers from the highest to the lowest, as in the import linter; entry points have no layer."""
WITHOUT_TORCH = LINTER[1]["source_modules"]


def test_the_public_names_are_frozen():
    """A name that goes away breaks programs; one that comes is a promise."""
    assert paceline.__all__ == [
        "__version__",
        "Batch",
        "Data",
        "Family",
        "Group",
        "Layout",
        "Loader",
        "Loss",
        "Model",
        "Objective",
        "PacelineError",
        "Replica",
        "Run",
        "Settings",
        "export",
        "full_state_dict",
        "join",
        "load_latest",
        "load_model",
        "parallelize",
        "register",
        "save",
        "checkpoint",
        "comm",
        "compression",
        "data",
        "exporting",
        "monitor",
        "optim",
        "parallel",
        "programs",
        "recipes",
        "replica",
        "schedules",
        "simulator",
        "sync",
        "topology",
        "training",
    ]


PUBLIC = {
    "checkpoint": "AsyncSaver Checkpoint CheckpointStore DamagedError SafetensorsReader SafetensorsWriter "
    "SavedCheckpoint SavedState TensorBlock TensorSpec",
    "comm": "Group HostGroup LocalGroup ProgramGroup SharedMemoryGroup SharedMemoryWarning TorchGroup Work join",
    "compression": "AutoCodec BF16 Codec DGC FP16 Int8 NoCodec OneBit PowerSGD RandomK TopK",
    "data": "BadSampleWarning BadSamples Batch Data DataManifest DifferentStreamsWarning FileData FileSource Full "
    "FunctionData GlobalOrder Images Interval IterableSource JoinedSource Ledger Loader MapSource MaskedText Mixture "
    "MixtureSource NoIndexWarning PackedText Padding SampleOrder Sequential Source Spec Splits StepPlan Text Windows "
    "apportion derive_seed",
    "parallel": "Construction ContextParallelModule Experts HasPipelineLayers Mesh MixtureOfExperts ModelShard ORDERS "
    "Pipeline PipelineLayer PipelineSettings STYLES Style TiedHead UndeferrableError balance_loss defer parallelize "
    "register_experts register_styles",
    "programs": "Algorithm Collective Direct DoubleTree HalvingDoubling Hierarchical Naive Program RecursiveDoubling "
    "Ring Round Torus chunk_bounds find_algorithm list_algorithms",
    "replica": "Loss Replica StepResult UnusedParametersWarning full_state_dict load_latest save",
    "sync": "ADPSGD ASGD AdaptiveLocalSGD AdaptiveMixing ChocoSGD DPSGD DiLoCo EASGD EveryStep HierarchicalLocalSGD "
    "LocalSGD ParameterServer PostLocalSGD PushSum Rule SSP Scaffold StreamingDiLoCo Traffic",
    "training": "Anomalies Callback Classification Evaluation FunctionLoss FunctionModel MaskedLM Metrics Model "
    "NextToken Objective Run RunFile TrainingView compile_blocks evaluate train",
}
"""Public names that pages show, by package."""


@pytest.mark.parametrize("package", PUBLIC)
def test_the_public_names_of_packages_are_frozen(package):
    assert sorted(importlib.import_module(f"paceline.{package}").__all__) == PUBLIC[package].split()


@pytest.mark.parametrize("name", paceline.__all__)
def test_every_public_name_is_there(name):
    found = getattr(paceline, name)
    assert name == "__version__" or name in getattr(found, "__name__", "")
    assert name in dir(paceline)


def test_a_name_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(AttributeError, match=r"'paceline' has no attribute 'Replicas'; it has: .*Replica,"):
        _ = paceline.Replicas


def packages():
    return [info.name for info in pkgutil.walk_packages(paceline.__path__, "paceline.") if info.ispkg]


@pytest.mark.parametrize("package", packages())
def test_every_package_lists_what_it_offers(package):
    module = importlib.import_module(package)
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert missing == []
    assert len(set(module.__all__)) == len(module.__all__)


def numbered_layer(name):
    doc = importlib.import_module(f"paceline.{name}").__doc__ or ""
    match = re.match(r"Layer (\d+): \S", doc)
    assert match, f"the first line of paceline.{name} must say its layer and what it is for, but it says: {doc[:60]!r}"
    return int(match[1])


@pytest.mark.parametrize("name", [name for layer in LAYERS for name in layer])
def test_every_first_line_says_the_layer(name):
    assert 0 <= numbered_layer(name) <= 11


def test_layers_are_numbered_as_the_import_linter_stacks_them():
    numbers = [{numbered_layer(name) for name in layer} for layer in LAYERS]
    assert all(len(layer) == 1 for layer in numbers), f"neighbours in one layer have one number: {numbers}"
    flat = [layer.pop() for layer in numbers]
    assert flat == sorted(flat, reverse=True)
    assert len(set(flat[:-1])) == len(flat[:-1]), "only errors and registry share the lowest"


def test_every_package_and_module_is_in_the_linters_layers():
    here = {info.name for info in pkgutil.iter_modules(paceline.__path__) if not info.name.startswith("_")}
    assert here == {name for layer in LAYERS for name in layer}


@pytest.mark.parametrize("package", [name for name in packages() if name.count(".") > 1])
def test_a_package_inside_another_is_of_its_layer(package):
    assert numbered_layer(package.removeprefix("paceline.")) == numbered_layer(package.split(".")[1])


def test_no_module_imports_itself_through_others():
    """Neither at run time nor for its types only."""
    graph = grimp.build_graph("paceline", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    # A circle is a CycleError that names its modules.
    order = {module: place for place, module in enumerate(TopologicalSorter(imports).static_order())}
    files = {path.relative_to(ROOT / "src").with_suffix("") for path in (ROOT / "src" / "paceline").rglob("*.py")}
    assert set(order) == {".".join(file.parts).removesuffix(".__init__") for file in files}
    assert all(order[found] < order[module] for module in imports for found in imports[module])
    assert order["paceline.errors"] < order["paceline.replica.replica"] < order["paceline.cli.main"]


def test_no_two_classes_have_one_name():
    found = collections.Counter(
        statement.name
        for path in (ROOT / "src").rglob("*.py")
        for statement in ast.parse(path.read_text()).body
        if isinstance(statement, ast.ClassDef)
    )
    assert {name for name, count in found.items() if count > 1} == set()


def imported_by(statement):
    """Return the top-level modules that a fresh interpreter has after `statement`."""
    script = f"{statement}\nimport sys; print(*(name for name in sys.modules if '.' not in name))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("package", ["comm", "compression", "optim", "parallel", "replica", "schedules", "sync"])
def test_errors_of_the_library_name_options_of_the_command_line_in_brackets_only(package):
    """Whoever has a loop of his own reads of arguments, `clip_norm=None (--clip_norm none)`."""
    found = []
    for path in (ROOT / "src" / "paceline" / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise | ast.Assign):
                texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                words = re.sub(r"\([^()]*\)", "", "".join(text for text in texts if isinstance(text, str)))
                found += [f"{path.name}: {option}" for option in re.findall(r"--\w+\S*|layout\.\w+ \d", words)]
    assert found == []


def test_importing_the_package_imports_nothing_heavy():
    assert not imported_by("import paceline") & {"torch", "numpy", "pydantic", "typer", "rich"}


def test_what_says_it_needs_no_torch_needs_none():
    """At run time too, which the linter cannot see: through a function's import, or another package."""
    statement = "\n".join(f"import {name}" for name in WITHOUT_TORCH)
    statement += "\nfrom paceline.schedules import Cosine; Cosine(warmup_steps=3).factor(5, 10)"
    imported = imported_by(statement)
    assert {"paceline", "pydantic"} <= imported
    assert "torch" not in imported


def test_the_types_are_shipped():
    assert (Path(paceline.__file__).parent / "py.typed").is_file()


def test_the_command_says_its_version_without_a_long_import():
    command = [sys.executable, "-X", "importtime", "-m", "paceline", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith(f"paceline {paceline.__version__}, torch 2.")
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE), "it needs no torch to say so"
