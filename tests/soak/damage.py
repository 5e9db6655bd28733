"""Damages files of a run and reads them: `python -m tests.soak.damage [NUMBER] [SEED]` (`make soak`).

Every reading must give the content that was written, or one sentence of a ValueError or OSError.
"""

import hashlib
import os
import random
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO

from fl_lightning.client.checkpoint_io import REGISTRY, FederatedCheckpointIO, read_registry
from fl_lightning.client.store import ClientStore
from fl_lightning.data import MNIST
from fl_lightning.data.published import PUBLISHED
from fl_lightning.federation.recorder import Recorder
from fl_lightning.methods import FedNTD
from fl_lightning.nets import Perceptron
from fl_lightning.runs.loggers import RoundCSVLogger
from tests.commands import CONFIGS, TINY, run_in, say
from tests.soak.kills import hash_of

PNG = b"\x89PNG\r\n\x1a\n"
RUBBISH = (b"", PNG + bytes(500), b"round,global/acc\n0,0.5\n", b"trainer: {}\n", b"\xff\xfe\x00rubbish")


def damaged(content: bytes, draw: random.Random) -> bytes:
    """The content with one of nine kinds of damage."""
    new = bytearray(content)
    at = draw.randrange(len(content))
    length = draw.randrange(1, max(2, len(content) // 4))
    kind = draw.randrange(9)
    if kind < 3:
        new[at] ^= 1 << draw.randrange(8)
    elif kind == 3:
        new[at : at + length] = bytes(len(new[at : at + length]))
    elif kind == 4:
        new = new[:at]
    elif kind == 5:
        new[at : at + length] = draw.randbytes(len(new[at : at + length]))
    elif kind == 6:
        new = new[:at] + new[at + length :]
    elif kind == 7:
        new += draw.randbytes(length)
    else:
        new = bytearray(draw.choice(RUBBISH))
    return bytes(new)


def fingerprint(value: Any) -> str:
    """Digest of a nest of tensors and plain values."""
    digest = hashlib.sha256()
    hash_of(value, digest)
    return digest.hexdigest()


def examine(path: Path, read: Callable[[], Any], number: int, draw: random.Random) -> Counter[str]:
    """Damage a file `number` times; counts what came of it."""
    whole = path.read_bytes()
    counts = Counter[str]()
    expected = fingerprint(read())
    for _ in range(number):
        path.write_bytes(damaged(whole, draw))
        try:
            outcome = "as written" if fingerprint(read()) == expected else "WRONG"
        except (ValueError, OSError) as error:
            outcome = "one sentence" if "\n" not in str(error) else f"LINES {error}"
        except Exception as error:
            outcome = f"TRACEBACK {type(error).__name__}: {str(error)[:80]}"
        counts[outcome] += 1
    path.write_bytes(whole)
    return counts


def rows(path: Path, state: dict[str, Any]) -> Any:
    """Rows of a metrics.csv as a continued run takes them: those that were written, or none."""
    recorder = Recorder()
    recorder.load_state_dict(state)
    found = RoundCSVLogger(path.parent, path.name).rows_on_disk()
    return {r: found[r] for r in range(state["rows"][0])} if recorder.wrote(found) else refuse(path)


def refuse(path: Path) -> None:
    raise ValueError(f"{path} has not the rows that this run has written")


def records(folder: Path, state: dict[str, Any]) -> Any:
    store = ClientStore(memory_budget_mb=0, folder=folder)
    store.load_state_dict(state)
    return [store.record(client_id) for client_id in sorted(store.clients)]


def names(path: Path) -> Any:
    found = read_registry(path)
    return refuse(path) if found is None else found


def printed(path: Path) -> Any:
    said = say(f"fit -c {path} --print_config")
    if said.code:
        raise ValueError(said.err.strip())
    return []  # another configuration is a configuration


def images(root: Path) -> Any:
    """Sizes and shape of the samples of small MNIST files: another pixel cannot be told from the one that was there."""
    train, test = MNIST(str(root)).load()
    return [len(train), len(test), list(next(iter(train.batches([torch.arange(2)], None)))[0].shape)]


def write_images(root: Path, draw: random.Random) -> list[Path]:
    """Write files as MNIST's, of 20 and 10 images."""
    PUBLISHED["MNIST"] = (20, 10)
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, n in (("train", 20), ("t10k", 10)):
        pixels = draw.randbytes(n * 28 * 28)
        labels = bytes(i % 10 for i in range(n))
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, n, 28, 28) + pixels)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, n) + labels)
    return sorted(raw.iterdir())


def soak(number: int, seed: int) -> int:
    """Read about `number` damaged files; returns how many readings were wrong."""
    draw = random.Random(seed)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        knfu = f"-c {CONFIGS}/experiment/digits_knfu.yaml --model.store.memory_budget_mb 0 --trainer.max_epochs 3"
        for line in (f"fit {TINY} --trainer.max_epochs 3", f"fit {knfu}"):
            assert say(line).code == 0
        simple = run_in(Path(folder))
        kept = run_in(Path(folder), stem="digits_knfu")
        saved = torch.load(kept / "checkpoints/last.ckpt", weights_only=True)["federated"]
        table = torch.load(simple / "checkpoints/last.ckpt", weights_only=True)["federated"]["recorder"]
        io = FederatedCheckpointIO(TorchCheckpointIO())
        file = next((kept / "clients").glob("*.safetensors"))
        config = Path(folder, "config.yaml")
        config.write_text((simple / "config.yaml").read_text())
        net = partial(Perceptron, hidden=[64])
        client = simple / "checkpoints/client.ckpt"
        plans: list[tuple[Path, Callable[[], Any], float]] = [
            (kept / "checkpoints/last.ckpt", partial(io.load_checkpoint, kept / "checkpoints/last.ckpt"), 0.3),
            (simple / "checkpoints/last.ckpt", partial(io.load_checkpoint, simple / "checkpoints/last.ckpt"), 0.2),
            (client, lambda: FedNTD.load_from_checkpoint(client, net=net).state_dict(), 0.15),
            (file, partial(records, kept / "clients", saved["store"]), 0.15),
            (kept / "clients" / REGISTRY, partial(names, kept / "clients" / REGISTRY), 0.08),
            (simple / "metrics.csv", partial(rows, simple / "metrics.csv", table), 0.08),
            (config, partial(printed, config), 0.04),
        ]
        root = Path(folder, "data")
        plans += [(path, partial(images, root), 0.03) for path in write_images(root, draw)]
        total = 0
        for path, read, share in plans:
            counts = examine(path, read, round(number * share), draw)
            total += counts.total()
            wrong += sum(n for outcome, n in counts.items() if outcome not in ("as written", "one sentence"))
            shown = ", ".join(f"{outcome}: {n}" for outcome, n in counts.most_common())
            print(f"{path.relative_to(folder)!s:90.90} {shown}", flush=True)
        os.chdir("/")
    print(f"{total} damaged files, {total - wrong} read as written or refused in one sentence, {wrong} not")
    return wrong


if __name__ == "__main__":
    arguments = [int(word) for word in sys.argv[1:]] + [0] * 2
    sys.exit(bool(soak(arguments[0] or 5200, arguments[1])))
