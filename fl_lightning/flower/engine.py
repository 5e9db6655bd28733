"""The engine at the server: jobs become messages to the clients' nodes, answers become results."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Any

from flwr.app import Array
from pytorch_lightning.utilities import rank_zero_info
from torchmetrics import MetricCollection

from fl_lightning.client.records import FileRecord, decode, encode
from fl_lightning.client.store import hash_of
from fl_lightning.engines import SequentialEngine
from fl_lightning.federation.identity import hash_of_value
from fl_lightning.federation.parts import FederationParts
from fl_lightning.flower.layouts import Answer, Layouts, message_layout
from fl_lightning.flower.nodes import Answers, Nodes
from fl_lightning.flower.wire import Content, demand, part_of, read_score, read_update, shown
from fl_lightning.functional.state import StateLike
from fl_lightning.functional.traffic import message_of
from fl_lightning.members.faults import ClientError
from fl_lightning.types import ClientJob, ClientResult, ClientScore, State

Reader = Callable[[ClientJob, Content], Answer]

FILE = "file"
"""Key in a client's record at the server of the name of its node's file."""


class RemoteEngine:
    """Trains and tests clients at their nodes (the `Engine` protocol).

    Args:
        local: the engine of this process, which knows the model's entries and what is trained.
        nodes: of the clients.
        parts: of the federation, whose store has records with the names of the nodes' files.
        settings: digests of the settings that all parties must have alike, by name.
        run: name of the run, under which nodes keep their files.

    Attributes:
        is_remote: True: personal entries stay where the clients are.
    """

    is_remote = True

    def __init__(
        self, local: SequentialEngine, nodes: Nodes, parts: FederationParts, settings: Mapping[str, str], run: str
    ) -> None:
        self._local = local
        self._nodes = nodes
        self._store = parts.store
        self._run = run
        self._rated = "accumulated_lr" in parts.needs
        self._settings = hash_of_value(dict(settings))
        self._round_idx = -1
        self._asked: dict[str, str] = {}
        """Ids of messages of the round by the digest of what was asked: what is asked again is not sent again."""
        self._answers: Answers = {}
        """Answers of the round, where the run goes on without clients that fail: the others are asked for again."""
        self._parts: dict[int, tuple[Any, Array]] = {}
        self._has: dict[int, Any] = {}
        """Digest of the frozen entries that a client's node has."""
        self._layouts = Layouts()
        self._named: dict[str, str] = {}
        """Names of the nodes' files by the file of the store that holds them."""

    def run(self, exchange: str, jobs: Iterable[ClientJob]) -> Generator[ClientResult, None, None]:
        """Send all jobs to their nodes, and yield the results as they come.

        Raises:
            ClientError: of a client without a node, of an answer that says so, or of one that must not be.
        """

        def read(job: ClientJob, content: Content) -> Answer:
            most = self._nodes.sites[job.client_id].sizes["train"]
            update, logged, file = read_update(content, job, most, self._rated)
            result = ClientResult(job._replace(memory={FILE: file} if file else {}), update, None, logged)
            return Answer(job, result, message_layout(update.extras, self._shared))

        for job, result, _, error in self._layouts.compare(exchange, self._answers_to("train", jobs, read)):
            if error is not None:
                raise self._error(job, error) from error
            yield result

    def evaluate(
        self,
        jobs: Iterable[ClientJob],
        batch_size: int,
        metrics: MetricCollection | None = None,
        channels_last: bool = False,
    ) -> Generator[ClientScore, None, None]:
        """Ask the nodes what their clients would deploy, and yield its scores as they come.

        Raises:
            ClientError: of a client without a score, unless the run goes on without clients that fail.
        """

        def read(job: ClientJob, content: Content) -> Answer:
            most = self._nodes.sites[job.client_id].sizes["test"]
            score = read_score(content["head"], job.client_id, most)
            return Answer(job, score, message_layout(score.metrics, {}, exact=True))

        more = {"batch_size": batch_size, "channels_last": channels_last}
        for job, score, _, error in self._layouts.compare("deployed", self._answers_to("evaluate", jobs, read, more)):
            if error is None:
                yield score
            elif self._local.tolerant:
                rank_zero_info(f"client {job.client_id} has no score in round {job.broadcast.round_idx}: {error}")
            else:
                raise self._error(job, error) from error

    # --- messages ----------------------------------------------------------------------------------------------

    @property
    def _shared(self) -> State:
        """The shared entries as they lie in the module, for their names, shapes and types."""
        return self._local.global_weights.live(self._local.global_weights.shared)

    def _answers_to(
        self, kind: str, jobs: Iterable[ClientJob], read: Reader, more: Content | None = None
    ) -> Iterator[Answer]:
        """Ask nodes, and yield what was read of their answers, or what is wrong with them."""
        asked = {job.client_id: (job, self._message(kind, job, more or {})) for job in jobs}
        for job, content, problem in self._exchange(kind, asked):
            try:
                demand(not problem, problem)
                answer = read(job, content)
            except Exception as error:  # whatever a node sends
                answer = Answer(job, error=error)
            yield answer

    def _message(self, ask: str, job: ClientJob, more: Content) -> dict[str, Array]:
        """Encode what a node is asked about a client."""
        broadcast = job.broadcast
        global_weights = self._local.global_weights
        file = job.memory.get(FILE)
        head = {
            "ask": ask,
            "client_id": job.client_id,
            "round_idx": broadcast.round_idx,
            "exchange": broadcast.exchange,
            "uploads": broadcast.uploads,
            "settings": self._settings,
            "trained": hash_of_value(global_weights.trainable),
            "frozen": list(global_weights.frozen.already_sent),
            "lr_factors": [list(row) for row in self._local.local.lr_factors],
            "run": self._run,
            "file": file,
            "named": sorted({*self._names(job.client_id), *([file] if file else [])}),
        }
        # what a client starts from besides what it was sent
        sent = broadcast.weights or {}
        start = job.start or {}
        frozen = global_weights.frozen.already_sent
        if start and (sent or frozen):
            start = {n: v for n, v in start.items() if sent.get(n) is not v and n not in frozen}
        states = {"weights": message_of(broadcast.weights), "start": start, "personal": None if file else job.personal}
        parts = {name: self._part(state) for name, state in states.items()}
        parts["frozen"] = self._frozen_part(job.client_id, {} if frozen.keys() <= sent.keys() else frozen)
        return {"head": part_of(head | more), "extras": part_of(dict(broadcast.extras)), **parts}

    def _frozen_part(self, client_id: int, frozen: State) -> Array:
        """Encode entries that nobody trains, or only their digest where the client's node has them."""
        if not frozen:
            return part_of({"digest": "", "entries": {}})
        if id(frozen) not in self._parts:
            digest = hash_of(encode(dict(frozen)))
            self._parts[id(frozen)] = (frozen, digest), part_of({"digest": digest, "entries": dict(frozen)})
        (_, digest), whole = self._parts[id(frozen)]
        return part_of({"digest": digest, "entries": None}) if self._has.get(client_id) == digest else whole

    def _part(self, state: StateLike | None) -> Array:
        """Encode a state, once for all clients that are sent the same object."""
        if id(state) not in self._parts:
            self._parts[id(state)] = state, part_of(state and dict(state))
        return self._parts[id(state)][1]

    def _exchange(
        self, kind: str, asked: Mapping[int, tuple[ClientJob, dict[str, Array]]]
    ) -> Generator[tuple[ClientJob, Content, str], None, None]:
        """Send messages that were not sent in this round, and yield jobs with answers and problems as they come."""
        round_idx = next((job.broadcast.round_idx for job, _ in asked.values()), self._round_idx)
        if any(client_id not in self._nodes.sites for client_id in asked):
            self._nodes.look(f"in round {round_idx}")  # it may have come meanwhile
        if round_idx != self._round_idx:
            self._round_idx = round_idx
            self._asked = {}
            self._answers = {}
        digests = {client_id: digest_of_parts(parts) for client_id, (_, parts) in asked.items()}
        new = [c for c in asked if digests[c] not in self._asked and c in self._nodes.sites]
        messages = [(self._nodes.sites[client_id].node_id, asked[client_id][1]) for client_id in new]
        ids = self._nodes.send(kind, messages, str(round_idx))
        self._asked |= {digests[client_id]: message_id for client_id, message_id in zip(new, ids, strict=True)}
        self._parts.clear()
        waiting = {self._asked[digests[c]]: job for c, (job, _) in asked.items() if c in self._nodes.sites}
        for client_id in asked.keys() - self._nodes.sites.keys():
            yield asked[client_id][0], {}, "no node has registered it"
        unanswered = [message_id for message_id in waiting if message_id not in self._answers]
        for message_id in waiting.keys() - set(unanswered):
            yield waiting[message_id], *self._answers[message_id]
        for answers in self._nodes.replies(unanswered):
            if self._local.tolerant:
                self._answers |= answers
            for message_id, (content, problem) in answers.items():
                self._has[waiting[message_id].client_id] = content.get("has")
                yield waiting[message_id], content, problem

    def _error(self, job: ClientJob, error: Exception) -> ClientError:
        """Name client, node and round."""
        known = isinstance(error, ValueError)
        reason = shown(str(error)) if known else f"what it sent is no answer ({type(error).__name__})"
        site = self._nodes.sites.get(job.client_id)
        round_idx = job.broadcast.round_idx
        where = f" at {site}" if site else ""
        sentence = f"client {job.client_id}{where} failed in round {round_idx}: {reason}"
        return ClientError(f"{sentence}; mend that, or set model.faults.on_error to skip", job.client_id, reason)

    # --- files of the nodes ------------------------------------------------------------------------------------

    def _names(self, client_id: int) -> set[str]:
        """Names of the node's files that a checkpoint needs: those in records of the client that lie in files."""
        prefix = f"client_{client_id}_"
        folder = self._store.folder
        there = {path.name for path in folder.glob(f"{prefix}*") if FileRecord.is_name(path.name)}
        for name in there - self._named.keys():
            self._named[name] = decode((folder / name).read_bytes()).get("memory", {}).get(FILE, "")
        return {self._named[name] for name in there} - {""}


def digest_of_parts(parts: Mapping[str, Array]) -> str:
    """Hash the parts of a message, of which Flower hashes each once."""
    return sha256(repr([(name, part.object_id) for name, part in sorted(parts.items())]).encode()).hexdigest()
