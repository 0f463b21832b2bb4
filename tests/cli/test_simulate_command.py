import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.overrides_command import OverridesCommand
from paceline.cli.simulate import parse_bandwidths, parse_ranks, simulate
from paceline.errors import MissingExtraError, SettingsError, UnknownNameError
from paceline.simulator import Scaling
from paceline.simulator.picture import draw_scaling
from paceline.topology import FatTree, Switch


@pytest.fixture
def run(monkeypatch):
    """Return what the command line prints, or raise what it raises."""
    monkeypatch.setenv("COLUMNS", "120")
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command(cls=OverridesCommand)(simulate)

    def invoke(*arguments):
        result = CliRunner().invoke(app, list(arguments))
        if result.exception is not None:
            raise result.exception
        return result.stdout

    return invoke


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("2:1024", (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)),
        ("3:20", (3, 6, 12)),
        ("8:8", (8,)),
        ("3,6, 17", (3, 6, 17)),
        ("5", (5,)),
    ],
)
def test_ranks_are_doubled_or_listed(text, ranks):
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "8:2", "0:4", "1:2:3", "a:b", "two", "2,,4"])
def test_what_names_no_ranks_is_refused(text):
    with pytest.raises(SettingsError, match=r"^--ranks must be like 2:1024 or 3,6,12, but got"):
        parse_ranks(text)


def test_bandwidths_are_gigabits_unless_they_say_otherwise():
    assert parse_bandwidths("25,100, 1GB/s,10mbit") == [25e9 / 8, 12.5e9, 1e9, 1.25e6]
    with pytest.raises(SettingsError, match="a speed must be like 50mbit, 100gbit"):
        parse_bandwidths("25,fast")


def test_the_table_shows_times_and_efficiencies(run):
    printed = run("all-reduce", "--ranks", "4:8", "--bytes", "10MB", "--algorithms", "ring,halving-doubling")
    scaling = Scaling(num_bytes=1e7)
    lines = [line.split() for line in printed.splitlines()]
    assert ["time", "in", "ms", "at", "100", "Gb/s;", "*", "the", "fastest"] in lines
    for num_ranks in (4, 8):
        times_ms = [1000 * scaling.predict(name, num_ranks).total_s for name in ("ring", "halving_doubling")]
        assert [str(num_ranks), f"{times_ms[0]:.4g}", f"{times_ms[1]:.4g}*"] in lines
        for gbits in (25, 100, 200):
            ring, best = (scaling.predict(name, num_ranks, gbits * 1e9 / 8) for name in ("ring", "halving_doubling"))
            assert [str(num_ranks), f"{ring.efficiency:.1%}", f"{best.efficiency:.1%}*"] in lines


def test_points_are_written_as_json(run, tmp_path):
    path = tmp_path / "points.json"
    run(
        "reduce-scatter", "--ranks=4,8", "--algorithms=ring", "--bandwidths=25,50", "--json", str(path),
        "--cluster", "fat_tree", "--cluster.hosts_per_pod", "2", "--cluster.bandwidth", "10gbit", "--compute_s=0.01",
        "--cluster.host_bandwidths.1", "1gbit", "--pace", "own", "--overlap=0.5",
    )  # fmt: skip
    cluster = FatTree(hosts_per_pod=2, bandwidth="10gbit", host_bandwidths={1: "1gbit"})
    scaling = Scaling(collective="reduce_scatter", cluster=cluster, overlap=0.5, compute_s=0.01, own_pace=True)
    points = json.loads(path.read_text())
    assert len(points) == 6
    for point in points:
        expected = scaling.predict("ring", point["num_ranks"], point["bandwidth_bytes_per_s"])
        assert point == expected.__dict__
    assert {point["bandwidth_bytes_per_s"] for point in points} == {1.25e9, 25e9 / 8, 50e9 / 8}


def test_all_algorithms_that_can_do_it_are_compared_and_the_rest_explained(run):
    printed = run("all-to-all", "--ranks", "6", "--cluster", "dgx_a100", "--cluster.devices_per_host", "4")
    assert "naive" not in printed
    assert "double" not in printed
    assert "direct" in printed
    assert "hierarchical is skipped where it cannot run: num_ranks must be a multiple of ranks_per_host" in printed


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["all-reduces"], SettingsError, "collective must be 'all_reduce'"),
        (["all-reduce", "--algorithms", "rings"], UnknownNameError, "did you mean 'ring'"),
        (["all-reduce", "--cluster", "swich"], UnknownNameError, "did you mean 'switch'"),
        (["all-reduce", "--cluster.width", "3"], UnknownNameError, "width"),
        (
            ["all-reduce", "--cluster.bandwidth", "100"],
            SettingsError,
            "--cluster.bandwidth.*with its unit, .* got '100'",
        ),
        (["all-reduce", "--cluster.host_bandwidths.1", "50"], SettingsError, "with its unit"),
        (["all-reduce", "--cluster.bandwidth", "quick"], SettingsError, "a speed must be like 50mbit, 100gbit"),
        (["all-reduce", "--rank", "4"], UnknownNameError, "--rank must be the path of a setting"),
        (["all-reduce", "--compute_s", "0"], SettingsError, "compute_s must be greater than 0"),
        (["all-reduce", "--bytes", "big"], SettingsError, "a size must be like 100MB"),
        (["all-reduce", "--pace", "fast"], SettingsError, "--pace must be together or own, but got 'fast'"),
        (["broadcast", "--algorithms", "torus"], SettingsError, "a torus program must be one of"),
        (["all-reduce", "--cluster.num_hosts", "1"], SettingsError, "raise num_hosts"),
    ],
)
def test_what_cannot_work_is_told(run, arguments, error, words):
    arguments = [*arguments, "--ranks", "2"] if "--rank" not in arguments else arguments
    with pytest.raises(error, match=words):
        run(*arguments)


@pytest.mark.parametrize("option", ["--json", "--picture"])
def test_no_file_is_overwritten(run, tmp_path, option):
    path = tmp_path / "mine.png"
    path.write_text("mine")
    with pytest.raises(SettingsError, match=f"^{option} must be a new file, but .*mine.png exists; choose another"):
        run("all-reduce", "--ranks", "2", option, str(path))
    assert path.read_text() == "mine"


def test_a_picture_of_another_kind_is_refused_before_any_work(run, tmp_path):
    with pytest.raises(SettingsError, match=r"--picture must end in \.png or \.svg, but got .*mine\.jpg"):
        run("all-reduce", "--ranks", "2", "--picture", str(tmp_path / "mine.jpg"))
    with pytest.raises(SettingsError, match="a picture's format must be one of png, svg, but got 'jpg'"):
        draw_scaling([Scaling().predict("ring", 2)], "title", "jpg")


def test_the_picture_has_a_panel_for_each_bandwidth_and_a_line_for_each_algorithm(run, tmp_path):
    from PIL import Image

    arguments = ["all-reduce", "--ranks", "2:16", "--algorithms", "ring,naive", "--bandwidths", "25,400"]
    run(*arguments, "--picture", str(tmp_path / "a.png"))
    with Image.open(tmp_path / "a.png") as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24) or []}
        assert picture.size[0] > 1000
    assert {(0x3F, 0x57, 0xD6), (0xE0, 0x6A, 0x10)} < colours
    run(*arguments, "--picture", str(tmp_path / "a.svg"))
    drawing = (tmp_path / "a.svg").read_text()
    for words in ("25 Gb/s", "400 Gb/s", "ring", "naive", "all-reduce of 100 MB on switch"):
        assert f"<!-- {words}" in drawing
    assert "100 Gb/s" not in drawing, "what the cluster itself has was not asked for"


def test_a_picture_without_matplotlib_names_the_extra(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'paceline\[report\]'"):
        run("all-reduce", "--ranks", "2", "--picture", str(tmp_path / "a.png"))


def test_simulating_needs_neither_torch_nor_matplotlib():
    script = (
        "import sys; from paceline.simulator import Scaling; Scaling().predict('ring', 4)\n"
        "import paceline.cli.simulate, paceline.simulator.picture\n"
        "print(*(name for name in ('torch', 'matplotlib', 'numba') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_default_cluster_is_a_switch(run):
    assert "on switch" in run("broadcast", "--ranks", "2")
    assert Scaling().cluster == Switch()
