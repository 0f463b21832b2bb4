"""What is done to a run from outside while it trains: fuzzed control messages, old epochs, damaged checkpoints."""

import contextlib
import json
import os
import pickle
import random
import shutil
import socket
from pathlib import Path

from blake3 import blake3

from paceline.checkpoint import CheckpointStore
from paceline.comm.control import ControlAccess, ControlConnection, ControlError, ControlStore, EpochOverError
from paceline.comm.control.frames import FrameWriter
from paceline.comm.control.handshake import ClientHandshake
from paceline.comm.control.key_values import epoch_prefix


class Malicious:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._path),)


def attack(access: ControlAccess, folder: Path, chance: random.Random, num_attacks: int = 60) -> None:
    """Send a control server what is no message, a pickle, a message with another token, or a handshake that stops."""
    held = []
    for _ in range(num_attacks):
        with contextlib.suppress(OSError, ControlError):
            stranger = socket.create_connection((access.host, access.port), timeout=5)
            held.append(stranger)
            match chance.randrange(6):
                case 0:
                    stranger.sendall(chance.randbytes(chance.randrange(1, 4000)))
                case 1:
                    stranger.sendall(b"\xff" * 12 + chance.randbytes(100))
                case 2:
                    stranger.sendall(pickle.dumps(Malicious(folder / "unpickled")))
                case 3:
                    stranger.sendall(FrameWriter(os.urandom(32)).write({"do": "set", "keys": ["control/view"]}))
                case 4:
                    stranger.sendall(ClientHandshake(access.token).begin()[: chance.randrange(1, 30)])
                case 5:
                    wrong = ControlAccess(access.host, access.port, os.urandom(32))
                    ControlConnection(wrong, timeout_s=5).close()
    for stranger in held:
        stranger.close()
    # One that knows the token, and asks for what makes no sense.
    for _ in range(num_attacks):
        message = {"do": chance.choice(["set", "get", "_put", "announce", "append"]), "keys": [chance.random()]}
        with contextlib.suppress(ControlError):
            connection = ControlConnection(access, timeout_s=5)
            try:
                connection.request(message, 5.0)
            finally:
                connection.close()


def read_statuses(access: ControlAccess, names: list[str]) -> dict[str, bytes]:
    """Return what workers say of themselves."""
    store = ControlStore(access, timeout_s=5)
    try:
        return {name: store.get(f"control/status/{name}") for name in names}
    finally:
        store.close()


def come_back(access: ControlAccess, statuses: dict[str, bytes]) -> list[str]:
    """Do as a worker of an old epoch that wakes up: say again what was said then; return what is wrong."""
    store = ControlStore(access, timeout_s=5)
    problems = []
    try:
        view = json.loads(store.get("control/view"))
        for name, said in statuses.items():
            old = json.loads(said)
            votes = [said, json.dumps(old | {"phase": "lost", "step": 10_000, "reason": "it is old"})]
            if name not in view["names"]:
                votes.append(
                    json.dumps(old | {"phase": "lost", "beat": 10_000, "step": 10_000, "epoch": view["epoch"]})
                )
            for vote in votes:
                store.set(f"control/status/{name}", vote)
                store.add("control/mail", 1)
        for key in ("rank0", "shared memory"):
            try:
                store.set(f"{epoch_prefix(view['epoch'] - 1)}/{key}", b"old")
            except EpochOverError:
                continue
            problems.append(f"a write to epoch {view['epoch'] - 1} was taken in epoch {view['epoch']}")
    finally:
        store.close()
    return problems


def damage(run: Path, how: str, chance: random.Random) -> None:
    """Damage the newest checkpoint of a run, which has an older one."""
    newest, older = CheckpointStore(run / "checkpoints").list_checkpoints()[:2]
    path = chance.choice([file for file in newest.iterdir() if file.name != "COMMITTED"])
    content = path.read_bytes()
    match how:
        case "flipped bit":
            place = chance.randrange(len(content))
            path.write_bytes(
                content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]
            )
        case "cut":
            path.write_bytes(content[: chance.randrange(len(content))])
        case "swapped" | "stale":
            shutil.copy(older / path.name, path)
        case "missing":
            path.unlink()
        case "pickle":
            path.write_bytes(pickle.dumps(Malicious(run.parent / "unpickled")))
        case "path":
            _lead_outside(newest, run.parent)


def _lead_outside(checkpoint: Path, folder: Path) -> None:
    """Let a manifest, whose marker fits it, name a file outside of the checkpoint."""
    (tensors,) = checkpoint.glob("tensors-*.safetensors")
    shutil.copy(tensors, folder / tensors.name)
    manifest = (checkpoint / "manifest.json").read_text().replace(tensors.name, f"../../../{tensors.name}")
    marker = (checkpoint / "COMMITTED").read_text()
    old = blake3((checkpoint / "manifest.json").read_bytes()).hexdigest()
    (checkpoint / "manifest.json").write_text(manifest)
    (checkpoint / "COMMITTED").write_text(marker.replace(old, blake3(manifest.encode()).hexdigest()))
    tensors.unlink()
