"""The client side: one client of a federation at its own node, where its data, its memory and its personal entries are.

The node keeps memory and personal entries in files that never change. The server knows only the names of the files.
A round that is undone, or a run that is continued, goes back to the file of that time. The node deletes files that the
server no longer names.
"""

from collections.abc import Iterable
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, Message
from pytorch_lightning.plugins.precision import Precision

from fl_lightning.client.files import ClientFiles
from fl_lightning.data import FederatedDataModule
from fl_lightning.engines import SequentialEngine, local_engine
from fl_lightning.federation.identity import shared_settings
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.members import members_at_client
from fl_lightning.federation.server import Server
from fl_lightning.federation.values import hash_of_value
from fl_lightning.flower.layouts import message_layout
from fl_lightning.flower.nodes import schema_of_party
from fl_lightning.flower.wire import (
    Content,
    demand,
    from_records,
    part_of,
    parts_of_update,
    plain_score,
    read_scoring,
    shown,
    to_records,
)
from fl_lightning.members.codec import DownCoding
from fl_lightning.members.faults import ClientError, client_error
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.metrics.user_metrics import alone
from fl_lightning.types import Broadcast, ClientJob, Member, State
from fl_lightning.utils.keyed import keyed_generator


class Node:
    """Answers what the server asks of one client.

    Args:
        loop: The federation, as the server has it. No Trainer has set it up.
        data: The data with the client's samples.
        client_id: Id of the client, 0 … N−1.
        folder: Folder of the node's files.
        device: Device of the training. None is the CPU.
        precision: Precision plugin of Lightning. None is 32-true.
        max_epochs: Number of rounds of the run. None is not known.
    """

    def __init__(
        self,
        loop: FederatedLoop,
        data: FederatedDataModule,
        client_id: int,
        folder: str | Path,
        *,
        device: torch.device | None = None,
        precision: Precision | None = None,
        max_epochs: int | None = None,
    ) -> None:
        self.loop = loop
        self.data = data
        self.client_id = client_id
        self.folder = Path(folder)
        self.device = device or torch.device("cpu")
        self.precision = precision or Precision()
        loop.parts.horizon.begin_run(max_epochs)
        self.settings = shared_settings(
            loop.parts,
            data,
            precision=str(self.precision.precision),
            planned=loop.parts.horizon.planned,
        )

    @cached_property
    def engine(self) -> SequentialEngine:
        """Return the engine that trains the client."""
        parts = self.loop.parts
        parts.execution.limit_threads()
        engine = local_engine(
            parts.client,
            self.data,
            device=self.device,
            precision=self.precision,
            settings=parts.local_settings(),
            personal=parts.personal,
            keep=parts.keep,
            members=self._members,
            rounds=parts.horizon.rounds,
            inquiry=parts.server_module.inquiry,
        )
        server = Server(
            global_weights=engine.global_weights,
            data=self.data,
            store=parts.store,
            horizon=parts.horizon,
        )
        for transform in parts.transforms:
            transform.setup(server)
        return engine

    def _members(self, global_weights: GlobalWeights) -> Iterable[Member]:
        """List the members of a round that are at the client."""
        return members_at_client(self.loop.parts, global_weights)

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
            parts["plans"] = part_of(self.loop.parts.horizon.was_read)
        except Exception as error:
            self._forget_engine()
            known = error if isinstance(error, ClientError) else client_error(self.client_id, round_idx, error)
            parts = {"head": part_of({"error": shown(known.reason)})}
        return Message(to_records(parts), reply_to=message)

    # --- answers -----------------------------------------------------------------------------------------------

    def _introduce(self, content: Content) -> dict[str, Array]:
        """Tell which client this is, how many samples it has, and digests of its settings and of its schema."""
        self.data.prepare_data()
        self.data.setup("fit")
        view = self.data.view(self.client_id, 0)
        sizes = {split: view.size(split) for split in ("train", "test")}
        schema = schema_of_party(self.data, self.loop.parts.client)
        head = {
            "client_id": self.client_id,
            "sizes": sizes,
            "settings": self.settings,
            "schema": schema.digests(),
        }
        return {"head": part_of(head)}

    def _train(self, content: Content) -> dict[str, Array]:
        """Run an exchange, and keep the client's memory and personal entries in a file."""
        job = self._job(content)
        files = self._files_of(content["head"]["run"])
        with closing(self.engine.run(job.broadcast.exchange, [job])) as results:
            result = next(results)
            file = files.keep(job.broadcast.round_idx, job.memory, result.personal)
            answer = parts_of_update(result.update, logged=result.logged, file=file)
        scoring = content["head"].get("scoring")
        if scoring and file and job.data.size("test"):
            score = self._score_after(job, files.read(file), scoring)
            if score is not None:
                answer["score"] = part_of(score)
        return answer

    def _score_after(
        self, job: ClientJob, record: tuple[dict[str, Any], State | None], scoring: Content
    ) -> Content | None:
        """Test what the client would deploy after an exchange, if it gets nothing from the server before the test.

        Args:
            job: The job of the exchange.
            record: The client's memory and personal entries after it.
            scoring: How the client is tested.

        Returns:
            The score. None if the test has failed, because the client has been trained all the same. The server then
            asks for the score, and learns what is wrong.
        """
        memory, personal = record
        broadcast = Broadcast(job.broadcast.round_idx, "deployed", None)
        try:
            return self._score(job._replace(broadcast=broadcast, memory=memory, personal=personal), scoring)
        except Exception:
            self._forget_engine()
            return None

    def _forget_engine(self) -> None:
        """Drop the engine, which an error may have left in the middle of an exchange."""
        self.__dict__.pop("engine", None)

    def _evaluate(self, content: Content) -> dict[str, Array]:
        """Test what the client would deploy."""
        return {"head": part_of(self._score(self._job(content), content["head"]["scoring"]))}

    def _score(self, job: ClientJob, scoring: Content) -> Content:
        """Return the score of the client of a job.

        Args:
            job: The job of an exchange `deployed`.
            scoring: How the client is tested.
        """
        metrics = self.loop.metrics
        how = read_scoring(scoring, None if metrics is None else alone(metrics))
        with closing(self.engine.evaluate([job], how)) as scores:
            score = next(scores)
        return plain_score(score._replace(client_id=self.client_id))

    def _job(self, content: Content) -> ClientJob:
        """Make the job that a message is about.

        Raises:
            WireError: The message is of another client, of other settings or of another model.
        """
        head = content["head"]
        round_idx = head["round_idx"]
        engine = self.engine
        for name, here in (("client_id", self.client_id), ("settings", hash_of_value(self.settings))):
            demand(head[name] == here, f"{name} of a message must be {here}, as this node has it, got {{}}", head[name])
        shared = engine.global_weights.live(engine.global_weights.shared)
        weights = self._decoded(content["weights"], shared, round_idx)
        files = self._files_of(head["run"])
        start = {**files.shared(**content["frozen"]), **content["start"], **(weights or {})}
        is_alike = message_layout(start, {}, exact=True) == message_layout(shared, {}, exact=True)
        demand(is_alike, "the model's shared entries at the server must be those of this node; give both one YAML")
        is_finite = all(bool(value.isfinite().all()) for value in start.values())
        demand(is_finite, "the model of the server must be finite, and has NaN or infinite values; end the run there")
        self._freeze({name: start[name] for name in head["frozen"]}, round_idx)
        trains_alike = head["trained"] == hash_of_value(engine.global_weights.trainable)
        demand(
            trains_alike, "the same entries must be trained here and at the server; freeze them in the module itself"
        )
        engine.local.scale_lr(head["lr_factors"])
        files.collect(head["named"])
        memory: dict[str, Any] = {}
        personal = content["personal"]
        if head["file"]:
            memory, personal = files.read(head["file"])
        broadcast = Broadcast(
            round_idx=round_idx,
            exchange=head["exchange"],
            weights=weights,
            extras=content["extras"],
            uploads=head["uploads"],
        )
        return ClientJob(
            client_id=self.client_id,
            broadcast=broadcast,
            data=self.data.view(self.client_id, round_idx),
            memory=memory,
            personal=personal,
            start=start,
        )

    def _decoded(self, weights: State | None, shared: State, round_idx: int) -> State | None:
        """Return the weights of a broadcast as they were before the codec of the federation, if it has one.

        Args:
            weights: Weights of the broadcast, by name. None is a broadcast without weights.
            shared: The shared entries as they lie in the module.
            round_idx: Number of the round, from 0.
        """
        codec = self.loop.parts.codec
        if not codec or not weights:
            return weights
        draws = partial(
            keyed_generator,
            seed=self.data.batch_seed,
            purpose=DownCoding.PURPOSE,
            round_idx=round_idx,
        )
        return DownCoding(codec, self.engine.global_weights).decode(weights, shared, draws)

    def _freeze(self, already_sent: State, round_idx: int) -> None:
        """Learn which entries nobody trains and everybody has.

        Args:
            already_sent: These entries, by name.
            round_idx: Number of the round, from 0.
        """
        global_weights = self.engine.global_weights
        global_weights.load(already_sent)
        global_weights.frozen.load_state_dict({"since": dict.fromkeys(already_sent, round_idx)})
        global_weights.prepare()

    def _files_of(self, run: str) -> ClientFiles:
        """Return the files of the client in a run.

        Raises:
            WireError: The name of the run is no name of a folder.
        """
        demand(run.isalnum(), "run must be a name of letters and digits, got {}", run)
        return ClientFiles(self.folder / run, self.client_id)
