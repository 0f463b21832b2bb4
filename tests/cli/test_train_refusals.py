"""Bad input to `paceline train`: one clear message and exit code 2 each, and nothing is made or overwritten."""

import contextlib
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from paceline.checkpoint.durable import WriterLock
from paceline.cli.main import main
from paceline.recipes import find_recipe
from paceline.training.run_file import RunFile


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refuse(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    return capsys.readouterr().err


PLAIN = """
from functools import partial
import torch, paceline
from torch.utils.data import Dataset
def build(): return torch.nn.Linear(1, 1)
def data(): return [(torch.zeros(1), torch.zeros(1))] * 8
def loss(output, batch): return output.mean()
settings = dict(model=build, loss=loss, optimizer=partial(torch.optim.SGD, lr=1.0), global_batch=4, num_steps=2)
def run(): return paceline.Run(data=data, **settings)
def held(): return paceline.Run(data=Dataset(), **settings)
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train nope", "recipe must be a known name, but got 'nope'"),
        (
            "train transformer_lm --sync one_bit",
            "one_bit is a codec: take sync.codec (--sync.codec one_bit); known: ad_",
        ),
        (
            "train transformer_lm --sync.codec diloco",
            "got 'diloco'; diloco is a sync: take sync (--sync diloco); known:",
        ),
        ("train transformer", "did you mean 'transformer_lm'?"),
        ("train", "either a recipe or --resume RUN must be given, but got neither"),
        ("train transformer_lm --resume somewhere", "either a recipe or --resume RUN must be given, but got both"),
        ("train --resume somewhere --out elsewhere", "--resume goes on in the run's own directory, but got --out"),
        ("train transformer_lm --layout tp", "--layout must be its fields by name, each given by itself as NAME.FIELD"),
        ("train transformer_lm --go_on", "--out DIRECTORY, and starts or resumes the run there, but got no --out"),
        ("train --go_on", "but got no recipe; write paceline train RECIPE --out DIRECTORY --go_on"),
        ("train --go_on --resume somewhere", "but got --resume; write"),
        ("train transformer_lm --go_on --out empty_folder/..", "is neither; choose another\n"),
        ("train transformer_lm --max-restarts -1", "--max-restarts must be at least 0, but got -1"),
        (
            "train transformer_lm --workers 3 --sync asgd --sync.placement own --listen 127.0.0.1",
            "--listen must be given for a run whose workers may change, but servers of sync asgd have processes of",
        ),
        ("train transformer_lm --layout.tensor 2 --notice_s 9", "--notice_s must be given for a run whose workers may"),
        ("train transformer_lm --workers 2 --min_workers 3", "--min_workers must be at most the 2 workers, but got 3"),
        ("train transformer_lm --notice_s 0", "--notice_s must be more than 0 seconds, but got 0.0"),
        ("train transformer_lm --listen 0.0.0.0:29600", "must listen on one interface, but got host='0.0.0.0'"),
        ("train transformer_lm --listen 10.0.0.1:99999", "an address must be HOST or HOST:PORT, with brackets around"),
        ("train transformer_lm --scale_policy cheap", "--scale_policy must be one of efficient, or file.py:function"),
        ("train transformer_lm --prices missing", "--prices must be given with --scale_policy, but got missing alone"),
        (
            "train transformer_lm --scale_policy efficient --prices missing",
            "missing must hold prices as JSON, but could not be read",
        ),
        ("agent 10.0.0.1 --token_file missing", "an address must be HOST:PORT, with brackets around IPv6, but got 10."),
        (
            "agent [::1]:9 --token_file missing",
            "must hold the address and token of a run that trains now, but",
        ),
        ("agent [::1]:9 --token_file missing --workers 0", "--workers must be at least 1, but got 0"),
        ("scale missing -3", "the number of workers must be at least 1, but got -3; choose another"),
        ("scale missing --within_s 9", "--within_s must be given with --leave, but got 9.0 alone"),
        ("train plain.py --lr 1", "did you mean --optimizer.arguments.lr?"),
        ("train plain.py --optimizer.name adamw", "without .name; write --optimizer adamw"),
        ("train plain.py --optimizer.arguments.lr nan", "paceline: optimizer.arguments.lr must be a finite number"),
        ("train plain.py --optimizer.arguments.momentum true", "momentum must be a number, but got True"),
        ("train plain.py --clip_norm true", "--clip_norm must be a number, but got True"),
        ("train plain.py --optimizer torch.optim:AdmW", "did you mean 'AdamW'?"),
        ("train plain.py --optimizer torch.optim:Nope", "NAdam"),
        (
            "train plain.py --optimizer torch.nn:Linear",
            "a function or class that returns a torch Optimizer, but the class Linear is none",
        ),
        (
            "train plain.py --schedule torch.optim.lr_scheduler:SequentialLR",
            "no setting can give it 'schedulers', which takes objects of LRScheduler; write a function",
        ),
        ("train plain.py --schedule torch.optim.lr_scheduler:ChainedScheduler", "no setting can give it 'schedulers'"),
        ("train plain.py --data nofile.py:f", "paceline: data: the file of a function must exist"),
        ("train plain.py:held", "data must be a function at the top of a module that returns it, a registered name"),
        ("export missing --to .", "what is exported must have a name, but got '.'"),
        ("train transformer_lm --num_stps 4", "did you mean --num_steps?"),
        ("train transformer_lm --optimizer.learning_rat 4", "did you mean --optimizer.learning_rate?"),
        (
            "train transformer_lm --optimizer.learning_rate fast",
            "--optimizer.learning_rate must be a valid number",
        ),
        (
            "train transformer_lm --optimizer.learning_rate -1",
            "optimizer.learning_rate must be greater than 0, but got -1.0",
        ),
        ("train transformer_lm --num_steps 1.5", "--num_steps must be a valid integer"),
        ("train transformer_lm --num_steps", "--num_steps must have a value"),
        (
            "train transformer_lm --num_steps.x 1",
            "--num_steps.x must name a field, but num_steps has no fields of its own",
        ),
        (
            "train transformer_lm --sync gossip",
            "sync must be a known name, but got 'gossip'; did you mean",
        ),
        (
            "train transformer_lm --sync diloco --landing next_forward --clip_norm none",
            "landing must be update, but got next_forward with sync diloco",
        ),
        ("train transformer_lm --precision fp8", "--precision must be 'fp32', 'bf16' or 'fp16'"),
        ("train transformer_lm --workers 0", "--workers must be at least 1"),
        (
            "train transformer_lm --workers 3 --global_batch 2",
            "global_batch must be at least the number of workers",
        ),
        (
            "train transformer_lm --workers 3 --shares [1,2]",
            "shares must be 3 weights (one per worker)",
        ),
        ("train transformer_lm --data.path missing", "check --data.path"),
        ("train resnet --data.path missing", "missing"),
        ("train transformer_lm --data.path empty.txt", "empty.txt"),
        ("train transformer_lm --data.path short.txt", "short.txt"),
        ("train transformer_lm --data.path floats.npy", "float64"),
        ("train resnet --data.path empty_folder", "empty_folder"),
        ("train nofile.py:run", "the file of a function must exist"),
        ("train mine.py:walk", "must define the function 'walk', but it has: number"),
        ("train mine.py:number", "must return a paceline.Run, but got int"),
        ("train no.such.module:run", "must be importable"),
        ("train transformer_lm --compiler gcc", "compiler must be a known name, but got 'gcc'"),
        ("train transformer_lm --layout.tensor 3", "must be a multiple of tensor(3), but got"),
        ("train transformer_lm --layout.pipeline 50", "and the model has"),
        (
            'train transformer_lm --layout.pipeline 2 --pipeline.cuts ["nowhere"]',
            "cuts must name layers of the model at which a stage can begin, but got 'nowhere'",
        ),
        ("train resnet --layout.context 2", "inputs must be sequences of tokens for context(2)"),
        (
            "train transformer_lm --layout.context 3 --data.sequence_length 128",
            "a sequence for context(3) must be a multiple of 6 tokens, but got 128",
        ),
        (
            "train resnet --data.size 8 --global_batch 3 --num_steps 600",
            "where a micro-batch of some worker has one sample (1617 samples in global batches of 3)",
        ),
        ("train resnet --sync diloco --batch_norm global", "batch_norm must be local, but got global with sync diloco"),
        ("train --resume missing", "must hold run.json"),
        ("report missing", "missing"),
        ("bench nope", "benchmark must be a known name"),
        ("recipes nope", "recipe must be a known name"),
    ],
)
def test_bad_input_is_refused(here, monkeypatch, capsys, arguments, message):
    (here / "empty.txt").touch()
    (here / "short.txt").write_text("too short")
    np.save(here / "floats.npy", np.zeros(10_000))
    (here / "empty_folder").mkdir()
    (here / "mine.py").write_text("def number(): return 3\n")
    (here / "plain.py").write_text(PLAIN)
    before = sorted(here.iterdir())
    assert message in refuse(monkeypatch, capsys, *arguments.split())
    assert [path for path in sorted(here.iterdir()) if path.name != "__pycache__"] == before


def test_an_existing_directory_is_never_written_into(here, monkeypatch, capsys):
    (here / "precious").mkdir()
    (here / "precious" / "thesis.txt").write_text("years of work")
    error = refuse(monkeypatch, capsys, "train", "transformer_lm", "--out", "precious")
    assert "--out must be a new or empty directory" in error
    assert [path.name for path in (here / "precious").iterdir()] == ["thesis.txt"]


TINY = [
    "--num_steps",
    "6",
    "--checkpoint_interval",
    "3",
    "--evaluate_samples",
    "4",
    "--schedule.warmup_steps",
    "1",
    "--loss.sample_tokens",
    "0",
    "--model.width",
    "16",
    "--model.num_layers",
    "1",
    "--model.num_heads",
    "2",
    "--data.sequence_length",
    "16",
    "--data.max_bytes",
    "100000",
    "--global_batch",
    "4",
    "--num_threads",
    "1",
]


@pytest.mark.timeout(120)
def test_a_run_from_start_to_resume_to_report(here, run_here):
    first = run_here("train", "transformer_lm", "--workers", 2, "--out", "first", *TINY)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "held-out loss" in first.stdout
    for name in ("events.jsonl", "run.json", "report.html", "report.png"):
        assert (here / "first" / name).stat().st_size > 0
        assert name == "run.json" or str(here / "first" / name) in first.stdout
    more = run_here("train", "--resume", "first", "--num_steps", 8, "--workers", 3)
    assert more.returncode == 0, more.stdout + more.stderr
    assert "resumed from" in more.stdout
    assert more.stdout.splitlines()[:2] == [
        "changed by the command line: num_steps from 6 to 8",
        "changed by the command line: workers from 2 to 3",
    ]
    assert (here / "first" / "run-1.json").exists()
    (here / "first" / "report.html").unlink()  # as where the launcher was lost, and the workers have finished
    done = run_here("train", "--resume", "first")
    assert done.returncode == 0, done.stderr
    assert "the run in first is finished, at step 8 of 8: nothing is left to do" in done.stdout
    assert (here / "first" / "report.html").exists()
    done = run_here("train", "--resume", "first")
    assert done.returncode == 2
    assert "is at step 8 of 8" in done.stderr
    again = run_here("report", "first", "--tensorboard", "board")
    assert again.returncode == 0, again.stderr
    assert any((here / "board").iterdir())


@pytest.mark.timeout(120)
def test_an_error_of_the_users_own_code_shows_its_traceback_and_is_not_retried(here, run_here):
    (here / "mine.py").write_text(
        "from paceline.recipes.transformer_lm import run as base\n"
        "import paceline\n"
        "def build(): raise ZeroDivisionError('mine')\n"
        "def run(): return base().model_copy(update={'model': paceline.Model.model_validate(build)})\n"
    )
    done = run_here("train", "mine.py", "--out", "out", "--data.max_bytes", 100_000)
    assert done.returncode == 1
    assert "ZeroDivisionError: mine" in done.stdout + done.stderr
    assert "in build" in done.stderr
    assert "restart" not in done.stdout


def fail_on_disk(run_here, *arguments):
    done = run_here(*arguments)
    assert done.returncode == 1, "no fault of the input's"
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.timeout(120)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_or_read_only_disk_is_a_clear_error_and_keeps_what_there_is(here, run_here):
    disk = here / "disk"
    disk.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]).returncode
    ):
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        done = run_here("train", "transformer_lm", "--out", disk / "run", *TINY, "--model.width", 128)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "No space left on device" in done.stdout
        assert "restart" not in done.stdout
        with contextlib.suppress(OSError):
            (disk / "fill").write_bytes(bytes(2**20))
        assert "report.png could not be written: No space left" in fail_on_disk(run_here, "report", disk / "run")
        told = fail_on_disk(run_here, "train", "transformer_lm", "--out", disk / "new", *TINY)
        assert f"{disk / 'new' / 'run.json'} could not be written: No space left on device; free space there" in told
        assert not (disk / "new").exists()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        advice = "could not be written: Read-only file system; make the directory writable, or choose another"
        assert f"report.png {advice}" in fail_on_disk(run_here, "report", disk / "run")
        assert f".lock {advice}" in fail_on_disk(run_here, "train", "--resume", disk / "run")
        assert f"{disk / 'other'} {advice}" in fail_on_disk(
            run_here, "train", "transformer_lm", "--out", disk / "other", *TINY
        )
        (here / "runs").symlink_to(disk)
        assert f"runs/transformer_lm-1 {advice}" in fail_on_disk(run_here, "train", "transformer_lm", *TINY)
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.timeout(120)
def test_code_of_the_user_that_calls_exit_is_told_and_not_retried(here, run_here):
    (here / "mine.py").write_text(
        "import sys\n"
        "from paceline.recipes.transformer_lm import run as base\n"
        "import paceline\n"
        "def build(): sys.exit('no such luck')\n"
        "def run(): return base().model_copy(update={'model': paceline.Model.model_validate(build)})\n"
    )
    done = run_here("train", "mine.py", "--out", "out", "--workers", 1, "--data.max_bytes", 100_000)
    assert done.returncode == 1
    assert "SystemExit: no such luck" in done.stdout
    assert "restart" not in done.stdout


@pytest.mark.timeout(120)
def test_settings_that_a_resume_could_not_use_are_taken_back(here, run_here):
    first = run_here("train", "transformer_lm", "--workers", 1, "--out", "run", *TINY)
    assert first.returncode == 0, first.stdout + first.stderr
    before = (here / "run" / "run.json").read_text()
    there = set((here / "run").glob("*.json"))
    refused = run_here("train", "--resume", "run", "--num_steps", 9, "--model.width", 32)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert (here / "run" / "run.json").read_text() == before
    assert set((here / "run").glob("*.json")) == there, "the history has no change that was refused"


def test_a_second_launcher_of_one_run_is_refused(here, monkeypatch, capsys):
    (here / "run").mkdir()
    make_run_file = RunFile(
        recipe="transformer_lm", num_workers=1, run=find_recipe("transformer_lm")().model_dump(mode="json")
    )
    make_run_file.save(here / "run")
    (here / "run" / "events.jsonl").touch()
    with contextlib.ExitStack() as stack:
        lock = WriterLock(here / "run")
        lock.acquire()
        stack.callback(lock.release)
        assert "must have one writer" in refuse(monkeypatch, capsys, "train", "--resume", "run")
