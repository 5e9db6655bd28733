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

OPTIONS = {"wait": 0.0, "timeout": 5.0, "poll": 0.0}


class GridHere(Grid):
    """Hands messages to nodes of this process, which answer when they are pulled, the last first.

    Args:
        nodes: answers by node id; an answer None never comes.
        keys: public keys by node id.
    """

    def __init__(self, nodes: dict[int, Callable[[Message], Message]], keys: dict[int, bytes] | None = None) -> None:
        self.nodes = nodes
        self.keys = keys or {}
        self.waiting: dict[str, Message] = {}
        self.log: list[Message] = []
        self._ids = map(str, count(1))
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # as Flower sets them in a server app

    def get_nodes(self):
        return [NodeInfo(node_id=node_id, public_key=self.keys.get(node_id, b"")) for node_id in self.nodes]

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        pushed = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = next(self._ids)
            self.waiting[message.metadata.message_id] = message
            self.log.append(message)
            pushed.append(message.metadata.message_id)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]):
        answers = []
        for message_id in sorted(set(message_ids) & self.waiting.keys(), key=int, reverse=True)[:2]:
            message = self.waiting.pop(message_id)
            if (answer := self.nodes[message.metadata.dst_node_id](message)) is not None:
                answers.append(answer)
                self.log.append(answer)
        return answers

    def set_run(self, run):
        raise NotImplementedError

    run = property(lambda self: None)
    create_message = send_and_receive = None


class Nodes:
    """Nodes of a command line, all of which have the whole data, with node ids from 100."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.made = parts_of(arguments)
        self.folder = folder
        self.nodes: dict[int, Node] = {}
        for client_id in range(self.made.datamodule.num_clients):
            loop, data = copy.deepcopy((self.made.model, self.made.datamodule))
            rounds = self.made.config.fit.trainer.max_epochs
            self.nodes[100 + client_id] = Node(loop, data, client_id, folder / str(client_id), max_epochs=rounds)

    def grid(self) -> GridHere:
        return GridHere({node_id: node.answer for node_id, node in self.nodes.items()})


def federate(make_loop, make_data, folder, change=None, rounds=2, keys=None, timeout=5.0, **settings):
    """Fit a federation without a command line; `change` is given the answers by node id.

    Returns the loop, the grid and the server's nodes.
    """
    server = make_loop()
    data = make_data()
    made = [Node(make_loop(), make_data(), i, folder / str(i), max_epochs=rounds) for i in range(data.num_clients)]
    answers = {100 + node.client_id: node.answer for node in made}
    grid = GridHere(answers if change is None else change(answers), keys)
    shared = shared_settings(server.parts, data, "32-true", rounds)
    tolerant = server.parts.faults.on_error == "skip"
    nodes = Sites(grid, shared, data.num_clients, timeout, 0.0, tolerant)
    nodes.look()
    if isinstance(data.source, Elsewhere):
        data.source.sizes = nodes.sizes

    def factory(local):
        engine = RemoteEngine(local, nodes, server.parts, shared, "run")
        engine.scoring_after = server.scoring_after
        return engine

    server.engine_factory = factory
    fit(None, rounds, data, loop=server, **settings)
    return server, grid, nodes


def owners(files: list[str], parties: Path) -> GridHere:
    """Nodes that have their own folders only, as `fl-lightning split` writes them."""
    made = [node_of(tuple(files[1::2]), "", str(path)) for path in sorted(parties.glob("client_*/data.yaml"))]
    return GridHere({100 + node.client_id: node.answer for node in made})


def serve(arguments: list[str], grid: Grid, **options) -> ServerCLI:
    """Run the server of a federation."""
    with quiet_lightning():
        return ServerCLI(arguments, grid, {**OPTIONS, **options})
