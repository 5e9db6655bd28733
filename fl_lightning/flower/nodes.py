"""The nodes of a federation, as the server knows them: the client of each node, and its number of samples."""

import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch
from flwr.app import Array, Message
from flwr.serverapp import Grid
from pytorch_lightning.utilities import rank_zero_info

from fl_lightning.client import ClientModule
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.schema import Schema, differing
from fl_lightning.flower.wire import Content, WireError, demand, from_records, part_of, shown, to_records
from fl_lightning.members.faults import FaultError
from fl_lightning.utils.files import write_file
from fl_lightning.utils.life import heartbeat
from fl_lightning.utils.settings import check_above

Answers = dict[str, tuple[Content, str]]
"""Answers by the id of the message: the content, and what went wrong. An empty text means that nothing did."""

REMEDY = (
    "give all parties the same classes (data.num_classes, class names), shape, columns and scale (normalize, "
    "schema_file), or what split writes"
)
"""What to do if the parties read their samples in different ways."""


class Site(NamedTuple):
    """A node that has a client.

    Attributes:
        node_id: Flower's id of the node.
        key: Digest of the node's public key. It is empty if Flower knows no key.
        sizes: Number of samples of the client by split, as the node has registered.
    """

    node_id: int
    key: str
    sizes: dict[str, int]

    def __str__(self) -> str:
        if not self.key:
            return f"node {self.node_id}"
        return f"node {self.node_id} (key {self.key})"


class Nodes:
    """Finds the nodes, holds them to what they said first, and sends them messages.

    A client id belongs to the public key of the node that registered it first. Nobody else can answer for the client.

    Args:
        grid: Flower's connection to the nodes.
        settings: Digests of the settings that all parties must have alike, by name.
        num_clients: Number N of clients.
        timeout: Number of seconds that a node has for an answer, > 0.
        poll: Largest number of seconds between two looks for answers.
        tolerant: Whether the run goes on without nodes that may not take part.
        keys: JSON file of the key of every client, `{"0": "ab12…"}`. New keys are added to it. None keeps the keys for
            this run only.

    Attributes:
        sites: The nodes by client id.
        sizes: Number of samples by client and split.
        refused: Reasons why other nodes do not take part, by node id.
    """

    def __init__(  # noqa: PLR0917 - called by position
        self,
        grid: Grid,
        settings: Mapping[str, str],
        num_clients: int,
        timeout: float = 600.0,
        poll: float = 1.0,
        tolerant: bool = False,
        keys: str | Path | None = None,
    ) -> None:
        check_above(0, timeout=timeout)
        self._grid = grid
        self._settings = settings
        self._num_clients = num_clients
        self.timeout = timeout
        self._poll = poll
        self._tolerant = tolerant
        self._file = None if keys is None else Path(keys)
        self._keys: dict[str, str] = {}
        if self._file is not None and self._file.is_file():
            self._keys = json.loads(self._file.read_text())
        self.sites: dict[int, Site] = {}
        self.sizes: dict[int, dict[str, int]] = {}
        self.refused: dict[int, str] = {}
        self._schema: dict[str, str] = {}
        """Digests of the parts of the schema of the samples, as the first party that knows a part has it."""

    # --- who is there ------------------------------------------------------------------------------------------

    def wait(self, wanted: int, seconds: float, least: int) -> None:
        """Wait for clients.

        Args:
            wanted: Number of clients that ends the waiting.
            seconds: Largest number of seconds to wait.
            least: Number of clients that the run needs after that time.

        Raises:
            FaultError: A node may not take part, unless the run goes on without it.
            RuntimeError: There are fewer clients. The error has the reasons of nodes that were refused.
        """
        end = monotonic() + seconds
        while self.look() < wanted:
            if monotonic() < end:
                sleep(min(self._poll, 1.0))
                continue
            if len(self.sites) >= least:
                return
            reasons = "".join(f"; node {node_id}: {reason}" for node_id, reason in self.refused.items())
            raise RuntimeError(
                f"{least} clients must be there, and after {seconds:g} seconds there are {len(self.sites)}"
                f"{reasons}; start their SuperNodes, or raise wait"
            )

    def look(self, when: str = "before the first round") -> int:
        """Greet the nodes that are new, and return the number of known clients.

        The next call greets a node again that has not answered.

        Args:
            when: Time of the look, for messages.

        Raises:
            FaultError: A node may not take part, unless the run goes on without it.
        """
        keys = {int(node.node_id): key_of(node) for node in self._grid.get_nodes()}
        known = {site.node_id for site in self.sites.values()} | self.refused.keys()
        asked = {node_id: {"head": part_of({"ask": "hello"})} for node_id in sorted(keys.keys() - known)}
        sent = dict(zip(self.send("query", asked.items()), asked, strict=True))
        for answers in self.replies(sent):
            for message_id, (content, problem) in answers.items():
                node_id = sent[message_id]
                # What a node says may raise any error.
                try:
                    if not problem:
                        self._register(node_id, key=keys[node_id], head=content["head"])
                except Exception as error:
                    self.refused[node_id] = shown(str(error))
                reason = self.refused.get(node_id, problem)
                if reason:
                    rank_zero_info(f"node {node_id} takes no part {when}: {reason}")
        if self.refused and not self._tolerant:
            node_id, reason = next(iter(self.refused.items()))
            raise FaultError(
                f"node {node_id} may not take part, {when}: {reason}; or set model.faults.on_error to skip"
            )
        return len(self.sites)

    def _register(self, node_id: int, key: str, head: Mapping[str, Any]) -> None:
        """Register a node as the node of a client.

        Args:
            node_id: Flower's id of the node.
            key: Digest of the node's public key, empty if Flower knows no key.
            head: Head of the node's answer.

        Raises:
            WireError: A part of the answer breaks its rule, or the client belongs to another node.
        """
        client_id: Any = head.get("client_id")
        is_client = type(client_id) is int and 0 <= client_id < self._num_clients
        demand(is_client, f"client_id must lie in [0, {self._num_clients}), got {{}}; mend its data.yaml", client_id)
        names = self._differing(head.get("settings"))
        demand(not names, "its settings must be the server's, and these differ: {}; give it that YAML", names)
        schema = head.get("schema", {})
        are_digests = isinstance(schema, dict) and all(isinstance(value, str) for value in schema.values())
        demand(are_digests, "its schema must be digests by name, got {}; give it this version", schema)
        parts = ", ".join(differing(self._schema, schema))
        demand(not parts, f"its samples must be read as those of the other parties, and {{}} differ; {REMEDY}", parts)
        sizes: Any = head.get("sizes")
        counts: Any = {split: isinstance(sizes, dict) and sizes.get(split) for split in ("train", "test")}
        are_counts = all(type(size) is int and 0 <= size <= 2**40 for size in counts.values())
        demand(are_counts, "its numbers of samples must lie in [0, 2^40], got {}; mend its data", sizes)
        self._check_owner(client_id, key)
        site = Site(node_id=node_id, key=key, sizes=counts)
        self.sites[client_id] = site
        self.sizes[client_id] = counts
        self._schema = {**schema, **self._schema}
        if key and self._file is not None and str(client_id) not in self._keys:
            self._keys[str(client_id)] = key
            write_file(self._file, json.dumps(self._keys, indent=1) + "\n")
        rank_zero_info(f"client {client_id} is at {site}, with {counts['train']} training samples")

    def _check_owner(self, client_id: int, key: str) -> None:
        """Refuse a node whose client belongs to another one.

        Args:
            client_id: Id of the client, 0 … N−1.
            key: Digest of the node's public key, empty if Flower knows no key.

        Raises:
            WireError: The client belongs to another node or key.
        """
        other = self.sites.get(client_id)
        key_of_client = self._keys.get(str(client_id), key)
        is_same_node = other is None or (other.key == key and bool(key))
        owner = other or f"the key {key_of_client}"
        demand(
            key_of_client == key and is_same_node,
            f"client {client_id} belongs to {owner}, and only its node may answer for it; "
            f"give this node another client, or take the key out of the file of keys",
        )

    def compare_schema(self, schema: Schema | None) -> None:
        """Compare the samples of the server with the digests that its clients' nodes have sent.

        Args:
            schema: The schema of the server's own samples. None is a server without samples.

        Raises:
            FaultError: The server and a client read their samples in different ways.
        """
        known = {} if schema is None else schema.digests()
        parts = differing(known, self._schema)
        if parts:
            raise FaultError(
                f"the samples of the server must be read as those of its clients, and {', '.join(parts)} differ; "
                f"{REMEDY}"
            )
        self._schema = {**self._schema, **known}

    def _differing(self, theirs: Any) -> str:
        """Name the first settings of a node that are not the server's, at most 8."""
        known = theirs if isinstance(theirs, dict) else {}
        names = sorted({*self._settings, *map(str, known)})
        unequal = [name for name in names if known.get(name) != self._settings.get(name)]
        return ", ".join(unequal[:8])

    # --- messages ----------------------------------------------------------------------------------------------

    def send(self, kind: str, asked: Iterable[tuple[int, Mapping[str, Array]]], group: str = "") -> list[str]:
        """Send messages to nodes, and return their ids. The id of a message that Flower did not take is empty.

        Args:
            kind: Flower's type of the messages.
            asked: Ids of the nodes with the parts of their messages.
            group: Flower's id of the group of the messages.
        """
        messages = []
        for node_id, parts in asked:
            content = to_records(parts)
            messages.append(Message(content, node_id, kind, ttl=self.timeout, group_id=group))
        if not messages:
            return []
        ids = [message_id or "" for message_id in self._grid.push_messages(messages)]
        missing = len(messages) - len(ids)
        return ids + [""] * missing

    def replies(self, sent: Iterable[str]) -> Iterator[Answers]:
        """Yield the answers as they come. Answers that come together are one item.

        Flower gives out each answer once. A node that is late has a problem in place of an answer.

        Args:
            sent: Ids of the messages.
        """
        waiting = set(sent)
        end = monotonic() + self.timeout
        pause = 0.01
        if "" in waiting:
            waiting.discard("")
            yield {"": ({}, "Flower did not take the message")}
        while waiting:
            heartbeat()
            # An error of Flower has the SuperLink's own node id. The message that it answers tells the node.
            pulled: Answers = {}
            for reply in self._grid.pull_messages(waiting):
                pulled[reply.metadata.reply_to_message_id] = read_answer(reply)
            if not pulled and monotonic() >= end:
                pulled = {message_id: ({}, f"no answer within {self.timeout:g} seconds") for message_id in waiting}
            answers = {message_id: pulled[message_id] for message_id in sorted(waiting & pulled.keys())}
            if answers:
                waiting -= answers.keys()
                yield answers
            elif waiting:
                sleep(pause)
                pause = min(2 * pause, self._poll)


def schema_of_party(data: FederatedDataModule, client: ClientModule) -> Schema:
    """Return the schema of a party's samples, with the number of classes for which its net is built.

    A party may lack samples of the last classes. The parties compare its number of classes if somebody has stated the
    number, or if its net has as many outputs.

    Args:
        data: The data module of the party, which is set up.
        client: The client of the federation.
    """
    schema = data.source.schema or Schema()
    if client.module is not None:
        return schema
    return schema._replace(num_classes=data.num_classes, counts_classes=False)


def read_answer(reply: Message) -> tuple[Content, str]:
    """Read an answer: its content, and what went wrong. An empty text means that nothing did."""
    if reply.has_error():
        return {}, f"Flower's error {reply.error.code}: {shown(reply.error.reason or 'without a reason')}"
    try:
        content = from_records(reply.content, torch.device("cpu"))
    except WireError as error:
        return {}, str(error)
    head = content["head"]
    problem = shown(head["error"]) if "error" in head else ""
    return content, problem


def key_of(node: Any) -> str:
    """Digest the public key of a node, as Flower knows it. The digest is empty if Flower knows no key."""
    if not node.public_key:
        return ""
    return sha256(node.public_key).hexdigest()[:16]
