"""What `make wheel` builds trains where it is installed, with nothing of the source beside it."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(directory: Path, *command: object, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in variables} | variables
    done = subprocess.run(
        list(map(str, command)),
        cwd=directory,
        env={name: value for name, value in environment.items() if value},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_wheel_trains_in_a_bare_environment(tmp_path):
    run(tmp_path, sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", ROOT)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    options = ("--no-deps", "--no-index", "--no-compile")
    run(tmp_path, sys.executable, "-m", "pip", "--python", python, "install", *options, wheel)
    (site,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    # Dependencies are those of this environment, which spares it to install them; its paceline comes later in the path.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    where = run(tmp_path, python, "-c", "import paceline; print(paceline.__file__)", PYTHONPATH="")
    assert Path(where.strip()).is_relative_to(site)
    printed = run(
        tmp_path,
        *(tmp_path / "bare" / "bin" / "paceline", "train", "transformer_lm", "--workers", 2, "--out", "run"),
        *("--num_steps", 3, "--data.max_bytes", 50_000, "--evaluate_samples", 4),
        PYTHONPATH="",
    )
    assert "finished: held-out loss" in printed
    assert (tmp_path / "run" / "checkpoints" / "step-00000003" / "COMMITTED").is_file()
    assert (tmp_path / "run" / "report.html").is_file()
