"""The nodes of a federation, as the server knows them: which of them has which client, and how many samples."""

import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import chain
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
"""Answers by the id of the message: the content, and what went wrong, empty for nothing."""


REMEDY = (
    "give all parties the same classes (data.num_classes, class names), shape, columns and scale (normalize, "
    "schema_file), or what split writes"
)
"""What to do if the parties read their samples in different ways."""


class Site(NamedTuple):
    """A node that has a client.

    Args:
        node_id: Flower's.
        key: digest of its public key; empty where Flower knows none.
        sizes: samples of the client by split, as the node has registered.
    """

    node_id: int
    key: str
    sizes: dict[str, int]

    def __str__(self) -> str:
        return f"node {self.node_id}" + (f" (key {self.key})" if self.key else "")


class Nodes:
    """Finds the nodes, holds them to what they said first, and sends them messages.

    A client id belongs to the public key of the node that registered it first, so that nobody else can answer for it.

    Args:
        grid: Flower's.
        settings: digests of the settings that all parties must have alike, by name.
        num_clients: N.
        timeout: seconds that a node has for an answer.
        poll: most seconds between two looks for answers.
        tolerant: whether the run goes on without nodes that may not take part.
        keys: a JSON file of the key of every client, `{"0": "ab12…"}`, which are added as they are learnt; None: they
            hold for this run only.

    Attributes:
        sites: the nodes by client id.
        sizes: samples by client and split.
        refused: why other nodes do not take part, by node id.
    """

    def __init__(
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
        self._keys: dict[str, str] = json.loads(self._file.read_text()) if self._file and self._file.is_file() else {}
        self.sites: dict[int, Site] = {}
        self.sizes: dict[int, dict[str, int]] = {}
        self.refused: dict[int, str] = {}
        self._schema: dict[str, str] = {}
        """Digests of the parts of the schema of the samples, as the first party that knows a part has it."""

    # --- who is there ------------------------------------------------------------------------------------------

    def wait(self, wanted: int, seconds: float, least: int) -> None:
        """Wait for clients.

        Args:
            wanted: clients that end the waiting.
            seconds: that it lasts at most.
            least: clients that are needed then.

        Raises:
            RuntimeError: there are fewer, with the reasons of nodes that were refused.
        """
        end = monotonic() + seconds
        while self.look() < wanted:
            if monotonic() >= end:
                if len(self.sites) >= least:
                    return
                reasons = "".join(f"; node {node_id}: {reason}" for node_id, reason in self.refused.items())
                raise RuntimeError(
                    f"{least} clients must be there, and after {seconds:g} seconds there are {len(self.sites)}"
                    f"{reasons}; start their SuperNodes, or raise wait"
                )
            sleep(min(self._poll, 1.0))

    def look(self, when: str = "before the first round") -> int:
        """Greet the nodes that are new, and return how many clients are known.

        A node that does not answer is greeted again the next time.

        Raises:
            FaultError: of a node that may not take part, unless the run goes on without it.
        """
        keys = {int(node.node_id): key_of(node) for node in self._grid.get_nodes()}
        known = {site.node_id for site in self.sites.values()} | self.refused.keys()
        asked = {node_id: {"head": part_of({"ask": "hello"})} for node_id in sorted(keys.keys() - known)}
        sent = dict(zip(self.send("query", asked.items()), asked, strict=True))
        for message_id, (content, problem) in chain.from_iterable(part.items() for part in self.replies(sent)):
            node_id = sent[message_id]
            try:
                if not problem:
                    self._register(node_id, keys[node_id], content["head"])
            except Exception as error:  # whatever a node says
                self.refused[node_id] = shown(str(error))
            if reason := self.refused.get(node_id, problem):
                rank_zero_info(f"node {node_id} takes no part {when}: {reason}")
        if self.refused and not self._tolerant:
            node_id, reason = next(iter(self.refused.items()))
            raise FaultError(
                f"node {node_id} may not take part, {when}: {reason}; or set model.faults.on_error to skip"
            )
        return len(self.sites)

    def _register(self, node_id: int, key: str, head: Mapping[str, Any]) -> None:
        """Take a node for that of a client.

        Raises:
            WireError: naming what it may not be.
        """
        client_id: Any = head.get("client_id")
        known = type(client_id) is int and 0 <= client_id < self._num_clients
        demand(known, f"client_id must lie in [0, {self._num_clients}), got {{}}; mend its data.yaml", client_id)
        names = self._differing(head.get("settings"))
        demand(not names, "its settings must be the server's, and these differ: {}; give it that YAML", names)
        schema = head.get("schema", {})
        described = isinstance(schema, dict) and all(isinstance(value, str) for value in schema.values())
        demand(described, "its schema must be digests by name, got {}; give it this version", schema)
        parts = ", ".join(differing(self._schema, schema))
        demand(not parts, f"its samples must be read as those of the other parties, and {{}} differ; {REMEDY}", parts)
        sizes: Any = head.get("sizes")
        counts: Any = {split: isinstance(sizes, dict) and sizes.get(split) for split in ("train", "test")}
        counted = all(type(size) is int and 0 <= size <= 2**40 for size in counts.values())
        demand(counted, "its numbers of samples must lie in [0, 2^40], got {}; mend its data", sizes)
        other = self.sites.get(client_id)
        belongs = self._keys.get(str(client_id), key)
        demand(
            belongs == key and (other is None or (other.key == key and bool(key))),
            f"client {client_id} belongs to {other or f'the key {belongs}'}, and only its node may answer for it; "
            f"give this node another client, or take the key out of the file of keys",
        )
        self.sites[client_id], self.sizes[client_id] = (site := Site(node_id, key, counts)), counts
        self._schema = {**schema, **self._schema}
        if key and self._file is not None and str(client_id) not in self._keys:
            self._keys[str(client_id)] = key
            write_file(self._file, json.dumps(self._keys, indent=1) + "\n")
        rank_zero_info(f"client {client_id} is at {site}, with {counts['train']} training samples")

    def compare_schema(self, schema: Schema | None) -> None:
        """Compare the samples of the server with what its clients' nodes have told of theirs.

        Args:
            schema: The schema of the server's own samples. None: it has none.

        Raises:
            FaultError: They are read in different ways.
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
        """Name the first settings of a node that are not the server's."""
        theirs = theirs if isinstance(theirs, dict) else {}
        names = {*self._settings, *map(str, theirs)}
        return ", ".join(sorted(name for name in names if theirs.get(name) != self._settings.get(name))[:8])

    # --- messages ----------------------------------------------------------------------------------------------

    def send(self, kind: str, asked: Iterable[tuple[int, Mapping[str, Array]]], group: str = "") -> list[str]:
        """Send parts of messages to nodes, and return the ids of the messages, empty where one was not taken."""
        messages = [
            Message(to_records(parts), node_id, kind, ttl=self.timeout, group_id=group) for node_id, parts in asked
        ]
        ids = list(self._grid.push_messages(messages)) if messages else []
        return [message_id or "" for message_id in ids] + [""] * (len(messages) - len(ids))

    def replies(self, sent: Iterable[str]) -> Iterator[Answers]:
        """Yield the answers as they come, those that come together at once: Flower gives out each of them once.

        Who comes late has none.
        """
        waiting = set(sent)
        end = monotonic() + self.timeout
        pause = 0.01
        if "" in waiting:
            waiting.discard("")
            yield {"": ({}, "Flower did not take the message")}
        while waiting:
            heartbeat()
            # an error of Flower's has the SuperLink's own node id: the message that it answers tells whose it is
            pulled = {
                reply.metadata.reply_to_message_id: read_answer(reply) for reply in self._grid.pull_messages(waiting)
            }
            if not pulled and monotonic() >= end:
                pulled = {message_id: ({}, f"no answer within {self.timeout:g} seconds") for message_id in waiting}
            if answers := {message_id: pulled[message_id] for message_id in sorted(waiting & pulled.keys())}:
                waiting -= answers.keys()
                yield answers
            elif waiting:
                sleep(pause)
                pause = min(2 * pause, self._poll)


def schema_of_party(data: FederatedDataModule, client: ClientModule) -> Schema:
    """Return what the samples of a party decide, with the number of classes for which its net is built.

    A party may lack samples of the last classes. Its number of classes is compared if somebody has stated it, or if its
    net has as many outputs.

    Args:
        data: The data module of the party, which is set up.
        client: The client of the federation.
    """
    schema = data.source.schema or Schema()
    if client.module is not None:
        return schema
    return schema._replace(num_classes=data.num_classes, counts_classes=False)


def read_answer(reply: Message) -> tuple[Content, str]:
    """Read an answer: its content, and what went wrong."""
    if reply.has_error():
        return {}, f"Flower's error {reply.error.code}: {shown(reply.error.reason or 'without a reason')}"
    try:
        content = from_records(reply.content, torch.device("cpu"))
    except WireError as error:
        return {}, str(error)
    return content, shown(content["head"]["error"]) if "error" in content["head"] else ""


def key_of(node: Any) -> str:
    """Digest the public key of a node, as Flower knows it.

    Empty: none.
    """
    return sha256(node.public_key).hexdigest()[:16] if node.public_key else ""
