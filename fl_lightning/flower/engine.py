"""The engine at the server: jobs become messages to the clients' nodes, and answers become results."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

from flwr.app import Array
from pytorch_lightning.utilities import rank_zero_info

from fl_lightning.client.records import FileRecord, decode, encode
from fl_lightning.client.store import hash_of
from fl_lightning.engines import SequentialEngine
from fl_lightning.federation.parts import FederationParts
from fl_lightning.federation.values import hash_of_value
from fl_lightning.flower.layouts import Answer, Layouts, message_layout
from fl_lightning.flower.nodes import Answers, Nodes
from fl_lightning.flower.wire import Content, demand, part_of, plain_scoring, read_score, read_update, shown
from fl_lightning.functional.state import StateLike
from fl_lightning.functional.traffic import message_of
from fl_lightning.members.faults import ClientError
from fl_lightning.types import ClientJob, ClientResult, ClientScore, Scoring, State

Reader = Callable[[ClientJob, Content], Answer]


class KnownScore(NamedTuple):
    """Holds the score of a client that came with its answer to an exchange.

    Args:
        round_idx: Index of the round.
        file: Name of the node's file with what was tested.
        scoring: How it was tested.
        score: The score as the node has sent it.
    """

    round_idx: int
    file: str
    scoring: Content
    score: Content


FILE = "file"
"""Key of the name of the node's file, in a client's record at the server."""


class RemoteEngine:
    """Trains and tests clients at their nodes (the `Engine` protocol).

    Args:
        local: The engine of this process, which knows the model's entries and what is trained.
        nodes: The nodes of the clients.
        parts: The parts of the federation. Its store has records with the names of the nodes' files.
        settings: Digests of the settings that all parties must have alike, by name.
        run: Name of the run, under which nodes keep their files.

    Attributes:
        is_remote: True, because personal entries stay at the clients' nodes.
        scoring_after: Returns how the clients are evaluated after a round, or None if they are not. Clients without
            shared weights are then evaluated in the answer to the round's last exchange, because every message starts a
            process at its node. None evaluates them by messages of their own.
    """

    is_remote = True

    def __init__(  # noqa: PLR0917 - called by position
        self,
        local: SequentialEngine,
        nodes: Nodes,
        parts: FederationParts,
        settings: Mapping[str, str],
        run: str,
    ) -> None:
        self._local = local
        self._nodes = nodes
        self._store = parts.store
        self._horizon = parts.horizon
        self._run = run
        self._rated = "accumulated_lr" in parts.needs
        self._settings = hash_of_value(dict(settings))
        self._round_idx = -1
        self._asked: dict[str, str] = {}
        """Ids of messages of the round by their digest. The same message is not sent again."""
        self._answers: Answers = {}
        """Answers of the round, if the run goes on without clients that fail: it asks for the other answers again."""
        self._parts: dict[int, tuple[Any, Array]] = {}
        """Encoded parts of messages with their content, by the id of the content."""
        self._has: dict[int, Any] = {}
        """Digests of the frozen entries that the clients' nodes have, by client id."""
        self._layouts = Layouts()
        self._named: dict[str, str] = {}
        """Names of the nodes' files by the file of the store that holds them."""
        self.scoring_after: Callable[[int], Scoring | None] | None = None
        self._scores: dict[int, KnownScore] = {}
        """Scores that came with the answers to an exchange, by client id."""

    def run(self, exchange: str, jobs: Iterable[ClientJob]) -> Generator[ClientResult, None, None]:
        """Send all jobs to their nodes, and yield the results as they come.

        Args:
            exchange: Name of the exchange.
            jobs: Jobs of the cohort.

        Raises:
            ClientError: A client has no node, or its node's answer reports an error or breaks a rule.
        """
        jobs = list(jobs)
        scoring = self._scoring_with(exchange, jobs)

        def read(job: ClientJob, content: Content) -> Answer:
            most_samples = self._nodes.sites[job.client_id].sizes["train"]
            update, logged, file = read_update(
                content,
                job=job,
                most_samples=most_samples,
                rated=self._rated,
                root=self._local.client,
            )
            memory = {FILE: file} if file else {}
            if file and "score" in content:
                self._scores[job.client_id] = KnownScore(
                    round_idx=job.broadcast.round_idx,
                    file=file,
                    scoring=scoring,
                    score=content["score"],
                )
            result = ClientResult(job=job._replace(memory=memory), update=update, personal=None, logged=logged)
            return Answer(job, result, message_layout(update.extras, self._shared))

        answers = self._answers_to("train", jobs, read, more={"scoring": scoring} if scoring else {})
        for job, result, _, error in self._layouts.compare(exchange, answers):
            if error is not None:
                raise self._error(job, error) from error
            yield result

    def evaluate(self, jobs: Iterable[ClientJob], how: Scoring) -> Generator[ClientScore, None, None]:
        """Ask the nodes for the scores of what their clients would deploy, and yield the scores as they come.

        Args:
            jobs: Jobs of the clients.
            how: How the clients are tested. A node has its own copy of the metrics.

        Raises:
            ClientError: A client has no score, unless the run goes on without clients that fail.
        """

        def read(job: ClientJob, content: Content) -> Answer:
            most_samples = self._nodes.sites[job.client_id].sizes["test"]
            score = read_score(
                content["head"],
                client_id=job.client_id,
                most_samples=most_samples,
                classifies=how.classifies,
                is_tuned=how.tuning is not None,
            )
            metrics = dict(score.metrics)
            if score.tuned is not None:
                metrics |= {f"tuned/{name}": value for name, value in score.tuned.metrics.items()}
            return Answer(job, score, message_layout(metrics, {}, exact=True))

        answers = self._scores_of(jobs, plain_scoring(how), read)
        for job, score, _, error in self._layouts.compare("deployed", answers):
            if error is None:
                yield score
            elif self._local.tolerant:
                rank_zero_info(f"client {job.client_id} has no score in round {job.broadcast.round_idx}: {error}")
            else:
                raise self._error(job, error) from error

    def _scoring_with(self, exchange: str, jobs: Sequence[ClientJob]) -> Content:
        """Return how the clients are tested in their answers to an exchange. Empty if they are not.

        Args:
            exchange: Name of the exchange.
            jobs: Jobs of the cohort.
        """
        if not jobs or self.scoring_after is None or self._shared or exchange != self._local.client.exchanges[-1]:
            return {}
        how = self.scoring_after(jobs[0].broadcast.round_idx)
        return {} if how is None else plain_scoring(how)

    def _scores_of(self, jobs: Iterable[ClientJob], scoring: Content, read: Reader) -> Iterator[Answer]:
        """Yield the scores that came with answers to the round's last exchange, then ask nodes for the others.

        Args:
            jobs: Jobs of the clients.
            scoring: How the clients are tested.
            read: Reads a score.
        """
        others: list[ClientJob] = []
        for job in jobs:
            known = self._scores.pop(job.client_id, None)
            wanted = (job.broadcast.round_idx, job.memory.get(FILE), scoring)
            # What came with the answer was tested without what the server gives for the test.
            if known is None or job.broadcast.extras or (known.round_idx, known.file, known.scoring) != wanted:
                others.append(job)
            else:
                yield self._answer(job, {"head": known.score}, read)
        yield from self._answers_to("evaluate", others, read, more={"scoring": scoring})

    # --- messages ----------------------------------------------------------------------------------------------

    @property
    def _shared(self) -> State:
        """Return the shared entries as they lie in the module, for their names, shapes and types."""
        global_weights = self._local.global_weights
        return global_weights.live(global_weights.shared)

    def _answers_to(
        self,
        kind: str,
        jobs: Iterable[ClientJob],
        read: Reader,
        *,
        more: Content | None = None,
    ) -> Iterator[Answer]:
        """Ask nodes, and yield the contents of their answers, or what is wrong with them.

        Args:
            kind: Kind of the question, `train` or `evaluate`.
            jobs: Jobs of the clients.
            read: Reads the content of an answer.
            more: Further entries of the head of every message. None is no entry.
        """
        asked = {job.client_id: (job, self._message(kind, job, more or {})) for job in jobs}
        for job, content, problem in self._exchange(kind, asked):
            yield self._answer(job, content, read, problem=problem)

    def _answer(self, job: ClientJob, content: Content, read: Reader, *, problem: str = "") -> Answer:
        """Read the content of an answer, or tell what is wrong with it.

        Args:
            job: Job of the client.
            content: The content.
            read: Reads the content.
            problem: What is wrong with the answer before it is read. Empty if nothing is.
        """
        # What a node sends may raise any error.
        try:
            demand(not problem, problem)
            if content.get("plans") is True:
                # The module at a node has asked how many rounds are planned.
                self._horizon.rounds()
            return read(job, content)
        except Exception as error:
            return Answer(job, error=error)

    def _message(self, ask: str, job: ClientJob, more: Content) -> dict[str, Array]:
        """Encode the question to a node about its client.

        Args:
            ask: Kind of the question, `train` or `evaluate`.
            job: Job of the client.
            more: Further entries of the head.
        """
        broadcast = job.broadcast
        global_weights = self._local.global_weights
        already_sent = global_weights.frozen.already_sent
        file = job.memory.get(FILE)
        needed_files = self._names(job.client_id)
        if file:
            needed_files.add(file)
        head = {
            "ask": ask,
            "client_id": job.client_id,
            "round_idx": broadcast.round_idx,
            "exchange": broadcast.exchange,
            "uploads": broadcast.uploads,
            "settings": self._settings,
            "trained": hash_of_value(global_weights.trainable),
            "frozen": list(already_sent),
            "lr_factors": [list(row) for row in self._local.local.lr_factors],
            "run": self._run,
            "file": file,
            "named": sorted(needed_files),
        }
        sent = broadcast.weights or {}
        frozen = {} if already_sent.keys() <= sent.keys() else already_sent
        return {
            "head": part_of(head | more),
            "extras": part_of(dict(broadcast.extras)),
            "weights": self._part(message_of(broadcast.weights)),
            "start": self._part(further_start(job, already_sent)),
            "personal": self._part(None if file else job.personal),
            "frozen": self._frozen_part(job.client_id, frozen),
        }

    def _frozen_part(self, client_id: int, frozen: State) -> Array:
        """Encode entries that nobody trains, or only their digest if the client's node has them.

        Args:
            client_id: Id of the client, from 0.
            frozen: These entries, by name.
        """
        if not frozen:
            return part_of({"digest": "", "entries": {}})
        if id(frozen) not in self._parts:
            digest = hash_of(encode(dict(frozen)))
            encoded = part_of({"digest": digest, "entries": dict(frozen)})
            self._parts[id(frozen)] = ((frozen, digest), encoded)
        (_, digest), whole = self._parts[id(frozen)]
        if self._has.get(client_id) == digest:
            return part_of({"digest": digest, "entries": None})
        return whole

    def _part(self, state: StateLike | None) -> Array:
        """Encode a state, once for all clients whose messages have the same object."""
        if id(state) not in self._parts:
            self._parts[id(state)] = (state, part_of(state and dict(state)))
        _, part = self._parts[id(state)]
        return part

    def _exchange(
        self, kind: str, asked: Mapping[int, tuple[ClientJob, dict[str, Array]]]
    ) -> Generator[tuple[ClientJob, Content, str], None, None]:
        """Send messages that were not sent in this round, and yield jobs with answers and problems as they come.

        Args:
            kind: Flower's type of the messages.
            asked: Jobs with the parts of their messages, by client id.
        """
        round_idx = next((job.broadcast.round_idx for job, _ in asked.values()), self._round_idx)
        sites = self._nodes.sites
        # A node may have come meanwhile.
        if any(client_id not in sites for client_id in asked):
            self._nodes.look(f"in round {round_idx}")
        if round_idx != self._round_idx:
            self._round_idx = round_idx
            self._asked = {}
            self._answers = {}
        digests = {client_id: digest_of_parts(parts) for client_id, (_, parts) in asked.items()}
        new = []
        messages = []
        for client_id, (_, parts) in asked.items():
            if client_id in sites and digests[client_id] not in self._asked:
                new.append(client_id)
                messages.append((sites[client_id].node_id, parts))
        ids = self._nodes.send(kind, messages, group=str(round_idx))
        for client_id, message_id in zip(new, ids, strict=True):
            self._asked[digests[client_id]] = message_id
        self._parts.clear()
        waiting: dict[str, ClientJob] = {}
        for client_id, (job, _) in asked.items():
            if client_id in sites:
                waiting[self._asked[digests[client_id]]] = job
        for client_id in asked.keys() - sites.keys():
            job, _ = asked[client_id]
            yield job, {}, "no node has registered it"
        unanswered = [message_id for message_id in waiting if message_id not in self._answers]
        for message_id in waiting.keys() - set(unanswered):
            content, problem = self._answers[message_id]
            yield waiting[message_id], content, problem
        for answers in self._nodes.replies(unanswered):
            if self._local.tolerant:
                self._answers |= answers
            for message_id, (content, problem) in answers.items():
                self._has[waiting[message_id].client_id] = content.get("has")
                yield waiting[message_id], content, problem

    def _error(self, job: ClientJob, error: Exception) -> ClientError:
        """Return an error that names client, node and round.

        Args:
            job: Job of the client.
            error: What is wrong with the answer.
        """
        if isinstance(error, ValueError):
            reason = shown(str(error))
        else:
            reason = f"what it sent is no answer ({type(error).__name__})"
        site = self._nodes.sites.get(job.client_id)
        where = f" at {site}" if site else ""
        sentence = f"client {job.client_id}{where} failed in round {job.broadcast.round_idx}: {reason}"
        return ClientError(f"{sentence}; mend that, or set model.faults.on_error to skip", job.client_id, reason)

    # --- files of the nodes ------------------------------------------------------------------------------------

    def _names(self, client_id: int) -> set[str]:
        """Return the names of the node's files that a checkpoint needs: the names in the client's records in files."""
        folder = self._store.folder
        records = {path.name for path in folder.glob(f"client_{client_id}_*") if FileRecord.is_name(path.name)}
        for name in records - self._named.keys():
            record = decode((folder / name).read_bytes())
            self._named[name] = record.get("memory", {}).get(FILE, "")
        return {self._named[name] for name in records} - {""}


def further_start(job: ClientJob, frozen: State) -> State:
    """Return the entries that a client starts from besides the weights of the broadcast and frozen entries.

    Args:
        job: Job of the client.
        frozen: Entries that nobody trains and everybody has, by name.
    """
    sent = job.broadcast.weights or {}
    start = job.start or {}
    if not start or not (sent or frozen):
        return start
    further: State = {}
    for name, value in start.items():
        if sent.get(name) is not value and name not in frozen:
            further[name] = value
    return further


def digest_of_parts(parts: Mapping[str, Array]) -> str:
    """Hash the parts of a message by Flower's hashes of the parts, which Flower makes once."""
    ids = [(name, part.object_id) for name, part in sorted(parts.items())]
    return sha256(repr(ids).encode()).hexdigest()
