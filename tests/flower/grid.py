"""A grid in this process, and federations over it."""

import copy
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path

from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fl_lightning.cli.console import quiet_lightning
from fl_lightning.cli.parser_only import parts_of
from fl_lightning.data import Elsewhere
from fl_lightning.federation.identity import shared_settings
from fl_lightning.flower.apps import ServerCLI, node_of
from fl_lightning.flower.engine import RemoteEngine
from fl_lightning.flower.node import Node
from fl_lightning.flower.nodes import Nodes as Sites
from tests.toys import fit

FIRST_NODE = 100
"""Node id of client 0."""

OPTIONS = {"wait": 0.0, "timeout": 5.0, "poll": 0.0}


class GridHere(Grid):
    """Hands messages to nodes of this process. They answer when an answer is pulled, the last message first.

    Args:
        nodes: Functions that answer, by node id. An answer None never comes.
        keys: Public keys by node id.
    """

    def __init__(self, nodes: dict[int, Callable[[Message], Message]], keys: dict[int, bytes] | None = None) -> None:
        self.nodes = nodes
        self.keys = keys or {}
        self.waiting: dict[str, Message] = {}
        self.log: list[Message] = []
        self._ids = count(1)
        # Flower sets these in a server app.
        TaskIdentity.task_id = 1
        TaskIdentity.run_id = 1
        TaskIdentity.node_id = 1

    def get_nodes(self):
        return [NodeInfo(node_id=node_id, public_key=self.keys.get(node_id, b"")) for node_id in self.nodes]

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        pushed = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(next(self._ids))
            self.waiting[message.metadata.message_id] = message
            self.log.append(message)
            pushed.append(message.metadata.message_id)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]):
        answers = []
        waiting = sorted(set(message_ids) & self.waiting.keys(), key=int, reverse=True)
        for message_id in waiting[:2]:
            message = self.waiting.pop(message_id)
            node = self.nodes[message.metadata.dst_node_id]
            answer = node(message)
            if answer is not None:
                answers.append(answer)
                self.log.append(answer)
        return answers

    def set_run(self, run):
        raise NotImplementedError

    run = property(lambda self: None)
    create_message = send_and_receive = None


class Nodes:
    """Holds the nodes of a command line, with node ids from 100. Each of them has the whole data."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.made = parts_of(arguments)
        self.folder = folder
        self.nodes: dict[int, Node] = {}
        for client_id in range(self.made.datamodule.num_clients):
            loop, data = copy.deepcopy((self.made.model, self.made.datamodule))
            self.nodes[FIRST_NODE + client_id] = node_in(
                folder, client_id, loop=loop, data=data, rounds=self.made.config.fit.trainer.max_epochs
            )

    def grid(self) -> GridHere:
        return GridHere({node_id: node.answer for node_id, node in self.nodes.items()})


def node_in(folder, client_id, *, loop, data, rounds):
    """Make the node of a client, with its files below `folder`."""
    return Node(loop, data, client_id=client_id, folder=folder / str(client_id), max_epochs=rounds)


def answers_of(nodes):
    """Return the functions that answer, by node id."""
    return {FIRST_NODE + node.client_id: node.answer for node in nodes}


def federate(make_loop, make_data, folder, change=None, *, rounds=2, keys=None, timeout=5.0, **settings):
    """Fit a federation without a command line.

    Args:
        make_loop: Makes the loop of the server and of each node.
        make_data: Makes the data of the server and of each node.
        folder: Folder of the nodes' files.
        change: Takes the functions that answer, by node id, and returns those that the grid calls. None changes none.
        rounds: Number of rounds.
        keys: Public keys by node id.
        timeout: Seconds that the server waits for an answer.
        settings: Settings of `fit`.

    Returns:
        The loop, the grid and the server's nodes.
    """
    server = make_loop()
    data = make_data()
    made = []
    for client_id in range(data.num_clients):
        made.append(node_in(folder, client_id, loop=make_loop(), data=make_data(), rounds=rounds))
    answers = answers_of(made)
    grid = GridHere(answers if change is None else change(answers), keys)
    shared = shared_settings(server.parts, data, precision="32-true", planned=rounds)
    nodes = Sites(
        grid,
        shared,
        num_clients=data.num_clients,
        timeout=timeout,
        poll=0.0,
        tolerant=server.parts.faults.on_error == "skip",
    )
    nodes.look()
    if isinstance(data.source, Elsewhere):
        data.source.sizes = nodes.sizes

    def factory(local):
        engine = RemoteEngine(local, nodes, server.parts, settings=shared, run="run")
        engine.scoring_after = server.scoring_after
        return engine

    server.engine_factory = factory
    fit(None, rounds, data, loop=server, **settings)
    return server, grid, nodes


def owners(files: list[str], parties: Path) -> GridHere:
    """Return a grid of nodes that have only their own folders, as `fl-lightning split` writes them.

    Args:
        files: Words of the command line: `-c` and a file by turns.
        parties: Folder of the parties.
    """
    configs = tuple(files[1::2])
    made = []
    for path in sorted(parties.glob("client_*/data.yaml")):
        made.append(node_of(configs, "", str(path)))
    return GridHere(answers_of(made))


def serve(arguments: list[str], grid: Grid, **options) -> ServerCLI:
    """Run the server of a federation."""
    with quiet_lightning():
        return ServerCLI(arguments, grid, {**OPTIONS, **options})
