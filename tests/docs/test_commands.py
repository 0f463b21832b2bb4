"""Each command on a page can be typed as it stands: it is run, smaller where it is long, or listed with a reason."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, list_blocks, list_commands

from paceline.cli import bench, compare, prepare, reproduce
from paceline.cli.main import app
from paceline.cli.overrides import apply_overrides, parse_pairs
from paceline.cli.prepare import make_run

COMMANDS = list_commands()
NOT_RUN = {
    "python3 -m venv .venv": "the environment that tests run in was made so",
    ". .venv/bin/activate": "the same",
    "pip install torch --index-url https://download.pytorch.org/whl/cpu": "it downloads",
    "pip install -c constraints.txt -e .[all]": "it downloads",
    "tensorboard --logdir tb": "a server; what it reads is written by a test of reports",
    "python examples/gpt2_library.py": "tests/examples",
    "torchrun --nproc-per-node 2 examples/gpt2_library.py": "tests/examples",
    "paceline export runs/first --to my-gpt2": "it takes a model of the transformers library: tests/exporting",
    "paceline checkpoint diff runs/first --which 300 runs/first --other 400": "two that differ: tests/cli",
    "paceline clusters": "tests/cli/test_clusters_command.py",
    "paceline clusters dgx_h100 > mine.json": "the same",
    "paceline prices": "tests/cli/test_prices_command.py",
    "paceline prices --csv grid > mine.csv": "the same",
    "paceline profile transformer_lm --workers 2 --out profile.json": "tests/planner/test_profiling.py",
    "paceline simulate training transformer_lm --profile profile.json --ranks 1,2,4": "the same",
    "paceline simulate training --spec in.json --json out.json": "rows of the reader's: tests/simulator/training",
    "paceline simulate training --spec in.json --calibrate measured.json --json out.json": "the same",
    "paceline profile mine.py:run": "tests/planner/test_profiling.py, on another recipe",
    "paceline plan mine.py:run": "tests/cli/test_plan_command.py, as all commands that plan",
    **dict.fromkeys(
        (
            "paceline plan mine.py:run --cluster dgx_h100 --num_ranks 64",
            "paceline plan mine.py:run --cluster mine.json",
            "paceline plan mine.py:run --cluster mine.json --num_ranks 4 --allow inexact",
            "paceline plan mine.py:run --measure 3",
            "paceline plan mine.py:run --profile profile.json",
            "paceline plan mine.py:run --cluster dgx_h100 --cluster dgx_a100 --num_ranks 16 --price dgx_h100=98.3 "
            "--price dgx_a100=40.9",
            'paceline plan --model {"name":"decoder","num_layers":40,"width":6144} '
            "--cluster dgx_h100 --num_ranks 64 --global_batch 1024",
            "paceline plan mine.py:run --cluster dgx_a100 --num_ranks 16 --memory 24GB",
            "paceline plan mine.py:run --cluster dgx_a100 --num_ranks 16 --within 8h",
            "paceline plan mine.py:run --cluster dgx_a100 --num_ranks 16 --price 40.9 --budget 50usd",
            "paceline plan mine.py:run --cluster dgx_a100 --num_ranks 16 --energy 20kWh",
            "paceline plan mine.py:run other.py:run --cluster dgx_a100 --num_ranks 16",
        ),
        "the same",
    ),
    "paceline data index photos": "photos of the reader's: tests/cli/test_data_command.py",
    "paceline data check photos": "the same",
    "paceline data prepare photos shards --format tar --shard_bytes 64MB": "the same",
    "make data-peers && paceline bench data --peers_python .data-peers/bin/python": "it downloads",
    "for try in 1 2 3 4 5; do torchrun --nproc-per-node 4 --max-restarts 3 own_loop.py && break; sleep 5; done": (
        "own_loop.py is run without"
    ),
}
OPTIONS = ("--workers", "--out", "--max-restarts", "--resume", "--plan")
"""Options of `paceline train` and `paceline memory` that are no settings of a run, and have a value."""
FLAGS = ("--go_on",)
SAME = {"train mine.py:run --out /shared/runs/first --go_on": "train mine.py:run --out runs/first --go_on"}
"""Commands that are run here as another is, whose directory differs alone."""
FAST_TRAINING = {"mine.py", "points.py", "sentences.py", "my_rule.py", "my_codec.py", "my_program.py"}
"""Files that train on up to three workers in every run of the tests; all other commands train in the slow ones."""
MORE_OF_THE_SAME = {
    "train transformer_lm --model.num_experts 8 --layout.expert 4 --layout.data 2 --model.capacity_factor 1.25": (
        "tests/parallel/test_expert.py"
    ),
    "train bert --layout.data 2 --layout.tensor 2 --layout.pipeline 2": "tests/recipes/test_bert_layouts.py",
    "train transformer_lm --workers 4 --global_batch 256 --optimizer lamb --optimizer.scaling square_root "
    "--optimizer.base_batch 8 --schedule.warmup_steps 200": "tests/optim",
}
"""Long trainings, of which other tests have what no other command has: they are trained in the campaign alone."""
TOO_LARGE = {"transformer_lm_1b": "eight ranks of it take 20 GB", "4096": "sequences of 4,096 tokens take minutes"}
ELSEWHERE = {"shards", "stories.jsonl", "all.txt"}
"""Data of the reader's, on which tests of the commands on data and of packing train."""
SMALLER = {
    ("compare", "codecs"): "--seeds 1 --only none,int8 --num_steps 2 --evaluate_samples 4",
    ("compare", "sync"): "--seeds 1 --only every_step,local_sgd --num_steps 2 --evaluate_samples 4",
    ("compare", "gossip"): "--seeds 1 --only ring --workers 4 --num_steps 2",
    ("bench", "codecs"): "--num_elements 5000 --num_pairs 2",
    ("bench", "checkpoints"): "--megabytes 8 --num_rounds 2",
    ("bench", "data"): '--cases ["resume","stall","language"] --num_images 64 --num_steps 1 --num_rounds 2 --batch 8',
    ("bench", "collectives"): '--num_pairs 2 --sizes ["4KiB"] --local_workers [2]',
}
NARROWER: dict[str, dict[str, int]] = {
    "transformer_lm": {"--model.width": 32, "--data.sequence_length": 32, "--evaluate_samples": 4},
    "bert": {"--model.width": 32, "--data.sequence_length": 32, "--evaluate_samples": 4},
    "resnet": {"--global_batch": 8, "--evaluate_samples": 4},
}
"""Settings of recipes whose commands train alike with less, where the command does not give them."""
FEWER_RANKS = {"simulate all-reduce --ranks 2:1024 --cluster switch --cluster.bandwidth 100gbit": ("--ranks", "2:64")}
"""Last words of a command that takes seconds, and of which the same with another number is run as it stands."""
LARGE = {
    "simulate all-reduce --ranks 2:1024 --cluster switch --cluster.bandwidth 25gbit": [pytest.mark.slow],
    "memory transformer_lm --workers 8 --model transformer_lm_1b --layout.sharded 8": [
        pytest.mark.slow,
        pytest.mark.campaign,
    ],
}
"""Commands that take many seconds."""
LONG = "it takes root, and hosts with limited links, or many trainings: tests/benchmarks has it"


def find(*starts: str) -> list[list[str]]:
    """Return the words of the `paceline` commands of these kinds, from the kind on, each once."""
    tails = [words[words.index("paceline") + 1 :] for words in COMMANDS if "paceline" in words]
    return [list(words) for words in dict.fromkeys(tails) if words[0] in starts]


def part_options(words: Sequence[str]) -> tuple[str, dict[str, str], list[str]]:
    """Return recipe, own options and overrides of a `paceline train` or `paceline memory`."""
    left, options = [word for word in words[1:] if word not in FLAGS], {}
    for option in OPTIONS:
        if option in left:
            place = left.index(option)
            options[option] = left[place + 1]
            del left[place : place + 2]
    recipe = "transformer_lm" if "--resume" in options else left.pop(0)
    return recipe, options, left


def name(words: Sequence[str]) -> str:
    return " ".join(words)


def test_each_command_is_run_by_some_test_here_or_listed():
    runs = {"train", "memory", "recipes", "verify", "simulate", "report", "trace", "export", "evaluate"}
    runs |= {"compare", "bench", "reproduce", "checkpoint", "data"}
    files = {block.file for block in list_blocks("python")}
    left = []
    for words in COMMANDS:
        is_ours = "paceline" in words and words[words.index("paceline") + 1] in runs
        is_script = words[0] == "python" and words[1] in files
        is_launched = words[0] == "torchrun" and words[-1] in files
        if not (is_ours or is_script or is_launched or words[0] == "make" or name(words) in NOT_RUN):
            left.append(name(words))
    assert left == []
    assert [command for command in NOT_RUN if tuple(command.split()) not in COMMANDS] == [], "no page has it any more"
    assert MORE_OF_THE_SAME.keys() <= {name(words) for words in find("train")}, "no page has it any more"


def test_a_command_that_is_run_as_another_differs_in_its_directory_alone():
    found = [name(words) for words in find("train")]
    for command, other in SAME.items():
        assert {command, other} <= set(found), "no page has it any more"
        (recipe, options, overrides), same = (part_options(words.split()) for words in (command, other))
        assert "--go_on" in command.split()
        assert (recipe, options | {"--out": same[1]["--out"]}, overrides) == same


def test_each_run_that_a_page_shows_is_trained_by_a_command():
    files = {block.file for block in list_blocks("python") if "def run()" in block.text}
    trained = {part_options(words)[0].partition(":")[0] for words in find("train")}
    assert files <= trained


@pytest.mark.parametrize("words", find("train", "memory"), ids=name)
def test_a_run_is_a_valid_one(words, reader):
    recipe, options, overrides = part_options(words)
    run = make_run(recipe, parse_pairs(overrides))
    layout = run.layout
    num_workers = int(options.get("--workers", (layout.data or 1) * layout.workers_of_replica))
    axes = layout.resolve(num_workers * layout.ranks_of_worker)
    assert axes.size("data", "sharded", "expert") == num_workers
    assert run.global_batch >= num_workers


def mark_trainings() -> Iterator[object]:
    """Yield each command, marked: with nothing that no command before it has, it is one more kind of the same."""
    seen: set[str] = set()
    for words in find("train"):
        recipe, options, _ = part_options(words)
        own = {recipe.partition(":")[0], *list_choices(words)}
        is_fast = recipe.partition(":")[0] in FAST_TRAINING and int(options.get("--workers", 1)) < 4
        marks = [] if is_fast else [pytest.mark.slow, pytest.mark.timeout(180)]
        if not is_fast and (own <= seen or name(words) in MORE_OF_THE_SAME):
            marks.append(pytest.mark.campaign)
        elif not why_not(words):
            seen |= own
        yield pytest.param(words, marks=marks, id=name(words))


def why_not(words: list[str]) -> str:
    """Return why a command does not train here; empty if it does."""
    if large := [reason for word, reason in TOO_LARGE.items() if word in words]:
        return large[0]
    if other := SAME.get(name(words)):
        return f"it is run as {other} is"
    if ELSEWHERE.intersection(words):
        return "it needs data of the reader's: tests/cli/test_data_command.py, tests/data/test_packing.py"
    return "it needs a plan: tests/cli/test_plan_command.py" if "--plan" in words else ""


def list_choices(words: Sequence[str]) -> Iterator[str]:
    """Yield the options, each with what it chooses if that is a name."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            yield f"{word} {after}" if re.fullmatch("[a-z][a-z_0-9]*", after) else word


@pytest.fixture
def without_reports(request, monkeypatch):
    """Let slow trainings end without a report, which takes longer than most of them: quick ones write theirs."""
    if request.node.get_closest_marker("slow"):
        monkeypatch.setattr(prepare, "write_report", lambda directory: None)


@pytest.mark.parametrize("words", list(mark_trainings()))
def test_a_run_trains(words, after_a_run, run_here, without_reports):
    if reason := why_not(words):
        pytest.skip(reason)
    recipe, options, overrides = part_options(words)
    if "model.safetensors" in words:
        assert run_here("export", "runs/first", "--to", "model.safetensors").returncode == 0
    run = make_run(recipe, parse_pairs(overrides))
    if "--resume" in options or "--go_on" in words:
        options = {key: value for key, value in options.items() if key != "--out"}
        begun = ["--resume", options.pop("--resume", "runs/first")]
        trained_steps = json.loads(Path(begun[1], "run.json").read_text())["run"]["num_steps"]
        shorter = ["--num_steps", trained_steps + 2]
    else:
        begun, options = [recipe], {**options, "--out": "runs/new"}
        shorter = ["--num_steps", 2, "--num_epochs", "none"]
        if run.growth.steps:
            overrides += ["--growth.steps", str([1 + index for index in range(len(run.growth.steps))])]
            shorter[1] = 2 + len(run.growth.steps)
        if recipe in ("transformer_lm", "bert") and "--data.path" not in overrides:
            shorter += ["--data.max_bytes", 50_000]
        shorter += [word for pair in NARROWER.get(recipe, {}).items() if pair[0] not in words for word in pair]
    own = [part for pair in options.items() for part in pair]
    done = run_here("train", *begun, *own, *overrides, *shorter)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished: held-out loss" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, marks=LARGE.get(name(words), []), id=name(words))
        for words in find("memory", "recipes", "verify", "simulate", "report", "trace", "export", "checkpoint", "data")
    ],
)
def test_a_command_runs_as_it_stands(words, after_a_run, run_here):
    if reason := NOT_RUN.get(name(["paceline", *words])):
        pytest.skip(reason)
    done = run_here(*words, *FEWER_RANKS.get(name(words), ()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_of_each_command_on_fewer_ranks_another_is_run_on_all():
    whole = {name(words[:6]) for words in find("simulate") if name(words) not in FEWER_RANKS}
    assert all(name(words.split()[:6]) in whole for words in FEWER_RANKS)
    assert FEWER_RANKS.keys() <= {name(words) for words in find("simulate")}, "no page has it any more"


@pytest.mark.parametrize("words", find("compare", "bench", "reproduce"), ids=name)
def test_the_settings_of_a_measurement_are_valid(words, reader):
    kind = {"compare": compare, "bench": bench, "reproduce": reproduce}[words[0]]
    names, overrides = words[1:], []
    if options := [word for word in names if word.startswith("--")]:
        place = names.index(options[0])
        names, overrides = names[:place], names[place:]
    for option in ("--hosts", "--bandwidth"):
        if option in overrides:
            place = overrides.index(option)
            del overrides[place : place + 2]
    settings = kind.find_settings(names)
    assert settings is not None
    apply_overrides(settings, parse_pairs(overrides))


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("words", find("compare", "bench"), ids=name)
def test_a_measurement_runs_when_it_is_smaller(words, reader, run_here):
    if (words[0] == "bench" and "--hosts" in words) or words[1] in ("convergence", "codec_choice"):
        pytest.skip(LONG)
    if "--peers_python" in words:
        pytest.skip("the environment of the other loaders is downloaded by its own make target")
    done = run_here(*words, *SMALLER[words[0], words[1]].split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert {
        "codecs": "int8",
        "sync": "local_sgd",
        "gossip": "ring",
        "collectives": "shared memory",
        "checkpoints": "stall",
        "data": "first batch at 9M",
    }[words[1]] in done.stdout


@pytest.mark.parametrize("target", sorted({words[1] for words in COMMANDS if words[0] == "make"}))
def test_make_knows_what_it_is_asked_for(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def launch(directory, *command: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *map(str, command)],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_of_the_command_line_has_each_command():
    page = (ROOT / "docs" / "cli.md").read_text()
    commands = [one.name or one.callback.__name__ for one in app.registered_commands]
    commands += [f"{one.name}{command}" for one in app.registered_groups for command in list_subcommands(one)]
    assert re.findall(r"```\{command-help\} (\w+(?: \w+)?)", page) == commands


def list_subcommands(group: Any) -> list[str]:
    """Return the names of a group's commands, each after a space, and before them the empty one for the group."""
    return ["", *(f" {one.name or one.callback.__name__}" for one in group.typer_instance.registered_commands)]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_loop_over_a_layout_runs_as_it_stands(reader):
    assert ("torchrun", "--nproc-per-node", "2", "layout_loop.py") in COMMANDS
    printed = launch(reader, "--nproc-per-node", 2, "layout_loop.py")
    losses = dict(re.findall(r"rank (\d) of 2: loss (\d+\.\d{6})", printed))
    assert set(losses) == {"0", "1"}
    assert losses["0"] == losses["1"]  # the two hold one model
    assert 5 < float(losses["0"]) < 5.9  # the bytes are random: 5.545 is all that can be learnt


@pytest.mark.campaign  # tests of python blocks run it on one, and that of the loop over a layout starts torchrun
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_loop_of_your_own_runs_on_four_workers(reader):
    assert ("torchrun", "--nproc-per-node", "4", "own_loop.py") in COMMANDS
    printed = launch(reader, "--nproc-per-node", 4, "own_loop.py")
    assert re.findall(r"step (\d+): loss", printed) == ["4", "8", "12", "16", "20", "24"]
    assert any((reader / "checkpoints-tagger").iterdir())
