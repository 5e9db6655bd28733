"""The client side: one client of a federation at its own node, where its data, its memory and its personal entries are.

What a client keeps lies in files of the node that never change. The server knows their names only, so that a round that
is undone or a run that is continued goes back to the file of that time. Files that it names no more are deleted.
"""

from collections.abc import Iterable
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, Message
from pytorch_lightning.plugins.precision import Precision

from fl_lightning.client.checkpoint_io import delete, file_names
from fl_lightning.client.records import FileRecord, decode, encode
from fl_lightning.client.store import hash_of, held
from fl_lightning.data import FederatedDataModule
from fl_lightning.engines import SequentialEngine, local_engine
from fl_lightning.federation.identity import hash_of_value, shared_settings
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.members import members_at_client
from fl_lightning.federation.server import Server
from fl_lightning.flower.wire import Content, WireError, from_records, part_of, parts_of_update, shown, to_records
from fl_lightning.members.faults import ClientError, client_error
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.metrics.user_metrics import alone
from fl_lightning.types import Broadcast, ClientJob, Member, State
from fl_lightning.utils.files import write_file


class Node:
    """Answers what the server asks of one client.

    Args:
        loop: of the federation, as the server has it; no Trainer has set it up.
        data: with the client's samples.
        client_id: 0 ... N-1.
        folder: of its files.
        device: that it trains on; None: the CPU.
        precision: a plugin of Lightning's; None: 32-true.
        max_epochs: rounds of the run; None: not known.
    """

    def __init__(
        self,
        loop: FederatedLoop,
        data: FederatedDataModule,
        client_id: int,
        folder: str | Path,
        device: torch.device | None = None,
        precision: Precision | None = None,
        max_epochs: int | None = None,
    ) -> None:
        self.loop, self.data, self.client_id, self.folder = loop, data, client_id, Path(folder)
        self.device, self.precision = device or torch.device("cpu"), precision or Precision()
        self.settings = shared_settings(loop.parts, data, str(self.precision.precision), max_epochs)
        self._max_epochs = max_epochs

    @cached_property
    def engine(self) -> SequentialEngine:
        """Engine that trains the client."""
        parts = self.loop.parts
        parts.execution.limit_threads()
        local, settings = parts.local_settings(self._max_epochs), (parts.personal, parts.keep)
        engine = local_engine(
            parts.client, self.data, self.device, self.precision, None, local, *settings, members=self._members
        )
        server = Server(engine.weights, self.data, parts.store)
        for transform in parts.transforms:
            transform.setup(server)
        return engine

    def _members(self, weights: GlobalWeights) -> Iterable[Member]:
        """List the members of a round that are at the client."""
        return members_at_client(self.loop.parts, weights)

    def answer(self, message: Message) -> Message:
        """Answer a message, with what went wrong if something does."""
        answers = {"hello": self._introduce, "train": self._train, "evaluate": self._evaluate}
        round_idx = -1
        try:
            content = from_records(message.content, self.device)
            head = content["head"]
            round_idx = int(head.get("round_idx", -1))
            parts = answers[head["ask"]](content)
            parts["has"] = part_of(content.get("frozen", {}).get("digest"))
        except Exception as error:
            self.__dict__.pop("engine", None)  # which may have been left in the middle
            known = error if isinstance(error, ClientError) else client_error(self.client_id, round_idx, error)
            parts = {"head": part_of({"error": shown(known.reason)})}
        return Message(to_records(parts), reply_to=message)

    # --- answers -----------------------------------------------------------------------------------------------

    def _introduce(self, content: Content) -> dict[str, Array]:
        """Tell which client this is, how many samples it has, and digests of its settings."""
        self.data.prepare_data()
        self.data.setup("fit")
        view = self.data.view(self.client_id, 0)
        sizes = {split: view.size(split) for split in ("train", "test")}
        return {"head": part_of({"client_id": self.client_id, "sizes": sizes, "settings": self.settings})}

    def _train(self, content: Content) -> dict[str, Array]:
        """Run an exchange."""
        job = self._job(content)
        with closing(self.engine.run(job.broadcast.exchange, [job])) as results:
            result = next(results)
            file = self._keep(content["head"]["run"], job, result.personal)
            return parts_of_update(result.update, result.logged, file)

    def _evaluate(self, content: Content) -> dict[str, Array]:
        """Test what the client would deploy."""
        head, job, metrics = content["head"], self._job(content), self.loop.metrics
        settings = head["batch_size"], None if metrics is None else alone(metrics), head["channels_last"]
        with closing(self.engine.evaluate([job], *settings)) as scores:
            score = next(scores)
        numbers = {"num_samples": float(score.num_samples), "correct": float(score.correct)}
        return {"head": part_of({"client_id": self.client_id, **numbers, "metrics": dict(score.metrics)})}

    def _job(self, content: Content) -> ClientJob:
        """Make the job that a message is about.

        Raises:
            WireError: another client, other settings, or another model.
        """
        head, engine = content["head"], self.engine
        for name, here in (("client_id", self.client_id), ("settings", hash_of_value(self.settings))):
            if head[name] != here:
                raise WireError(f"{name} of a message must be {here}, as this node has it, got {shown(head[name])}")
        weights = content["weights"]
        start = {**self._frozen_entries(head["run"], **content["frozen"]), **content["start"], **(weights or {})}
        wanted = {name: value for name, value in engine.weights.live(engine.weights.shared).items()}
        if layout_of(start) != layout_of(wanted):
            raise WireError("the model's shared entries at the server must be those of this node; give both one YAML")
        self._freeze({name: start[name] for name in head["frozen"]}, head["round_idx"])
        if head["trained"] != hash_of_value(engine.weights.trainable):
            raise WireError("the same entries must be trained here and at the server; freeze them in the module itself")
        engine.local.scale_lr(head["lr_factors"])
        self._collect(head["run"], frozenset(head["named"]))
        memory, personal = self._kept(head["run"], head["file"]) if head["file"] else ({}, content["personal"])
        broadcast = Broadcast(head["round_idx"], head["exchange"], weights, content["extras"], head["uploads"])
        data = self.data.view(self.client_id, head["round_idx"])
        return ClientJob(self.client_id, broadcast, data, memory, personal, start)

    def _freeze(self, already_sent: State, round_idx: int) -> None:
        """Learn which entries nobody trains and everybody has."""
        weights = self.engine.weights
        weights.load(already_sent)
        weights.frozen.load_state_dict({"since": dict.fromkeys(already_sent, round_idx)})
        weights.prepare()

    # --- files -------------------------------------------------------------------------------------------------

    def _keep(self, run: str, job: ClientJob, personal: State | None) -> str | None:
        """Write what the client keeps, and return the name of the file.

        None: it keeps nothing.
        """
        kept = held(self.client_id, job.broadcast.round_idx, job.memory, personal).content
        if not kept:
            return None
        content = encode(kept)
        file = FileRecord(self.client_id, job.broadcast.round_idx, hash_of(content), len(content))
        path = self._folder_of(run) / file.name
        if not path.exists():
            write_file(path, content)
        return file.name

    def _kept(self, run: str, name: str) -> tuple[dict[str, Any], State | None]:
        """Read what the client kept: memory and personal entries.

        Raises:
            FileNotFoundError: the file is not there.
            ValueError: it was altered.
        """
        path = self._folder_of(run) / name
        if not FileRecord.is_name(name) or not path.is_file():
            raise FileNotFoundError(
                f"client {self.client_id} needs its file {shown(name)}, which is not in {path.parent}; restore it, or "
                f"begin a new run"
            )
        content = path.read_bytes()
        if not name.endswith(f"_{hash_of(content)[:12]}.safetensors"):
            raise ValueError(f"{path} must be as it was written, and was altered; restore it, or begin a new run")
        kept = decode(content)
        return kept.get("memory", {}), kept.get("personal")

    def _frozen_entries(self, run: str, digest: str, entries: State | None) -> State:
        """Keep entries that nobody trains, which are sent once, or read those of a digest."""
        if not digest:
            return {}
        if not digest.isalnum():
            raise WireError(f"a digest must be of letters and digits, got {shown(digest)}")
        path = self._folder_of(run) / f"frozen_{digest}.safetensors"
        if entries is None:
            return dict(decode(path.read_bytes()))
        delete(path.parent, [old.name for old in path.parent.glob("frozen_*")])
        write_file(path, encode(entries))
        return entries

    def _collect(self, run: str, named: frozenset[str]) -> None:
        """Delete the client's files that the server names no more."""
        folder = self._folder_of(run)
        mine = {name for name in file_names(folder) if name.startswith(f"client_{self.client_id}_")}
        delete(folder, mine - named)

    def _folder_of(self, run: str) -> Path:
        """Folder of a run's files.

        Raises:
            WireError: a name of a run that is none.
        """
        if not run.isalnum():
            raise WireError(f"run must be a name of letters and digits, got {shown(run)}")
        return self.folder / run


def layout_of(state: State) -> dict[str, Any]:
    """Shapes and types by name."""
    return {name: (value.shape, value.dtype) for name, value in state.items()}
