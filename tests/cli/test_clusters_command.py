import json

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app


def run(*arguments):
    return CliRunner().invoke(app, ["clusters", *map(str, arguments)], catch_exceptions=True)


def test_all_clusters_and_devices_are_listed():
    output = run().output
    for name in ("dgx_a100", "tpu_v3_pod", "aws_p4d_24xlarge", "h200_141gb"):
        assert name in output


def test_what_is_printed_of_one_is_a_file_to_begin_from(tmp_path):
    path = tmp_path / "mine.json"
    settings = json.loads(run("dgx_h100").output)
    path.write_text(json.dumps({**settings, "bandwidth": "25gbit"}))
    printed = json.loads(run(path).output)
    assert printed["name"] == "dgx_h100"
    assert printed["bandwidth"] == 25e9 / 8
    assert printed["device"] == settings["device"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "dgx_h100", "device": "h100"}', "device must be a known name"),
        ('{"name": "dgx_h100", "bandwith": 1}', "did you mean 'bandwidth'"),
        ("{", "must be JSON"),
    ],
)
def test_a_file_that_describes_no_cluster_is_refused(tmp_path, text, message):
    path = tmp_path / "mine.json"
    path.write_text(text)
    assert message in str(run(path).exception)
    assert "can be read" in str(run(tmp_path / "none.json").exception)
