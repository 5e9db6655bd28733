"""Damages files of a run and reads them: `python -m tests.soak.damage [NUMBER] [SEED]` (`make soak`).

Every reading must give the content that was written, or one sentence of a ValueError or OSError.
"""

import hashlib
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from tests.soak.kills import hash_of, number_and_seed

PNG = b"\x89PNG\r\n\x1a\n"
RUBBISH = (b"", PNG + bytes(500), b"round,global/acc\n0,0.5\n", b"trainer: {}\n", b"\xff\xfe\x00rubbish")


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Return the content with one of seven kinds of damage. A flipped bit is as likely as three others."""
    at = draw.randrange(len(content))
    length = draw.randrange(1, max(2, len(content) // 4))
    kind = draw.randrange(9)
    before = content[:at]
    part = content[at : at + length]
    after = content[at + length :]
    if kind < 3:
        flipped = part[0] ^ (1 << draw.randrange(8))
        return before + bytes([flipped]) + content[at + 1 :]
    if kind == 3:
        return before + bytes(len(part)) + after
    if kind == 4:
        return before
    if kind == 5:
        return before + draw.randbytes(len(part)) + after
    if kind == 6:
        return before + after
    if kind == 7:
        return content + draw.randbytes(length)
    return draw.choice(RUBBISH)


def fingerprint(value: Any) -> str:
    """Return the digest of a nest of tensors and plain values."""
    digest = hashlib.sha256()
    hash_of(value, digest)
    return digest.hexdigest()


def examine(path: Path, read: Callable[[], Any], number: int, draw: random.Random) -> Counter[str]:
    """Damage a file `number` times, and count the outcomes."""
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
    """Return the rows of a metrics.csv as a continued run takes them: those that were written.

    Raises:
        ValueError: The file lacks the rows that were written.
    """
    recorder = Recorder()
    recorder.load_state_dict(state)
    found = RoundCSVLogger(path.parent, path.name).rows_on_disk()
    if not recorder.wrote(found):
        raise ValueError(f"{path} has not the rows that this run has written")
    return {r: found[r] for r in range(state["rows"][0])}


def records(folder: Path, state: dict[str, Any]) -> Any:
    store = ClientStore(memory_budget_mb=0, folder=folder)
    store.load_state_dict(state)
    return [store.record(client_id) for client_id in sorted(store.clients)]


def names(path: Path) -> Any:
    found = read_registry(path)
    if found is None:
        raise ValueError(f"{path} names no clients")
    return found


def printed(path: Path) -> Any:
    said = say(f"fit -c {path} --print_config")
    if said.code:
        raise ValueError(said.err.strip())
    # Another configuration is a configuration.
    return []


def images(root: Path) -> Any:
    """Return sizes and shape of the samples of small MNIST files. A pixel cannot be told from another."""
    train, test = MNIST(str(root)).load()
    x, *_ = next(iter(train.batches([torch.arange(2)], None)))
    return [len(train), len(test), list(x.shape)]


def big_endian(numbers: list[int]) -> bytes:
    """Write numbers of four bytes each."""
    return b"".join(number.to_bytes(4, "big") for number in numbers)


def write_images(root: Path, draw: random.Random) -> list[Path]:
    """Write the files of MNIST with 20 and 10 images."""
    PUBLISHED["MNIST"] = (20, 10)
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, n in (("train", 20), ("t10k", 10)):
        pixels = draw.randbytes(n * 28 * 28)
        labels = bytes(i % 10 for i in range(n))
        (raw / f"{part}-images-idx3-ubyte").write_bytes(big_endian([2051, n, 28, 28]) + pixels)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(big_endian([2049, n]) + labels)
    return sorted(raw.iterdir())


class Plan(NamedTuple):
    """Holds a file, the function that reads it, and its share of the damages."""

    path: Path
    read: Callable[[], Any]
    share: float


def plans_of(folder: Path, draw: random.Random) -> list[Plan]:
    """Make two runs in a folder, and return their files."""
    knfu = f"-c {CONFIGS}/experiment/digits_knfu.yaml --model.store.memory_budget_mb 0 --trainer.max_epochs 3"
    for line in (f"fit {TINY} --trainer.max_epochs 3", f"fit {knfu}"):
        assert say(line).code == 0
    simple = run_in(folder)
    kept = run_in(folder, stem="digits_knfu")
    simple_last = simple / "checkpoints/last.ckpt"
    kept_last = kept / "checkpoints/last.ckpt"
    store = torch.load(kept_last, weights_only=True)["federated"]["store"]
    recorder = torch.load(simple_last, weights_only=True)["federated"]["recorder"]
    load_checkpoint = FederatedCheckpointIO(TorchCheckpointIO()).load_checkpoint
    client = simple / "checkpoints/client.ckpt"
    record = next((kept / "clients").glob("*.safetensors"))
    registry = kept / "clients" / REGISTRY
    metrics = simple / "metrics.csv"
    config = folder / "config.yaml"
    config.write_text((simple / "config.yaml").read_text())

    def read_client() -> Any:
        return FedNTD.load_from_checkpoint(client, net=partial(Perceptron, hidden=[64])).state_dict()

    plans = [
        Plan(kept_last, partial(load_checkpoint, kept_last), share=0.3),
        Plan(simple_last, partial(load_checkpoint, simple_last), share=0.2),
        Plan(client, read_client, share=0.15),
        Plan(record, partial(records, kept / "clients", store), share=0.15),
        Plan(registry, partial(names, registry), share=0.08),
        Plan(metrics, partial(rows, metrics, recorder), share=0.08),
        Plan(config, partial(printed, config), share=0.04),
    ]
    root = folder / "data"
    for path in write_images(root, draw):
        plans.append(Plan(path, partial(images, root), share=0.03))
    return plans


def soak(number: int, seed: int) -> int:
    """Read about `number` damaged files, and return how many readings were wrong."""
    draw = random.Random(seed)
    wrong = 0
    total = 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for plan in plans_of(Path(folder), draw):
            counts = examine(plan.path, plan.read, number=round(number * plan.share), draw=draw)
            right = counts["as written"] + counts["one sentence"]
            total += counts.total()
            wrong += counts.total() - right
            shown = ", ".join(f"{outcome}: {n}" for outcome, n in counts.most_common())
            print(f"{plan.path.relative_to(folder)!s:90.90} {shown}", flush=True)
        os.chdir("/")
    print(f"{total} damaged files, {total - wrong} read as written or refused in one sentence, {wrong} not")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(soak(*number_and_seed(default=5200))))
