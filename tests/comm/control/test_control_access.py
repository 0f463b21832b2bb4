"""Access to a control server: in the environment, and in a file for its owner alone."""

import os
import stat

import pytest

from paceline.comm.control import ControlAccess
from paceline.errors import SettingsError

TOKEN = bytes(range(32))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "host.example"])
def test_environment_and_file_give_what_was_given(host, tmp_path):
    access = ControlAccess(host, 4711, TOKEN)
    assert ControlAccess.from_environment(access.environment()) == access
    access.save(tmp_path / "control.json")
    assert ControlAccess.load(tmp_path / "control.json") == access
    assert ControlAccess.from_environment({}) is None
    assert os.listdir(tmp_path) == ["control.json"]


def test_a_file_is_for_its_owner_alone(tmp_path):
    path = tmp_path / "control.json"
    path.write_text("of a former run")
    path.chmod(0o644)
    ControlAccess("127.0.0.1", 1, TOKEN).save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(SettingsError, match="must be readable by its owner alone, but has mode 640; chmod 600"):
        ControlAccess.load(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"address": "a:1"}'])
def test_a_file_that_is_none_says_so(text, tmp_path):
    path = tmp_path / "control.json"
    with pytest.raises(SettingsError, match="could not be read"):
        ControlAccess.load(path)
    path.write_text(text)
    with pytest.raises(SettingsError, match="could not be read"):
        ControlAccess.load(path)


@pytest.mark.parametrize(
    ("address", "token", "words"),
    [("host:x", "00" * 32, "invalid literal"), ("host:1", "zz", "non-hexadecimal"), ("host:1", "00", "32 bytes")],
)
def test_what_is_no_access_is_refused(address, token, words):
    variables = {"PACELINE_CONTROL_ADDRESS": address, "PACELINE_CONTROL_TOKEN": token}
    with pytest.raises(SettingsError, match=words):
        ControlAccess.from_environment(variables)


def test_the_token_is_not_printed():
    assert TOKEN.hex() not in repr(ControlAccess("host", 1, TOKEN))
    assert repr(TOKEN) not in repr(ControlAccess("host", 1, TOKEN))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x80garbage", "could not be read: it is not JSON; copy workers/control.json"),
        (b"garbage", "could not be read: it is not JSON; copy"),
        (b"[" * 100_000, "could not be read: it is not JSON; copy"),
        (b"[]", "could not be read: it is no object of JSON with both; copy"),
    ],
)
def test_a_file_of_garbage_is_refused_in_our_words(content, words, tmp_path):
    path = tmp_path / "control.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(SettingsError, match=words):
        ControlAccess.load(path)
