"""The two apps of a federation on Flower, made of the YAML of its simulation.

An app takes its settings from the run's configuration (`[tool.flwr.app.config]` of pyproject.toml, changed by
`flwr run --run-config`) and, at a node, from `flower-supernode --node-config`:

| name | meaning |
|---|---|
| `arguments` | more of the command line of `fl-lightning fit`, for the server and all nodes alike |
| `data` | a node's own file (`-c`) with its data; in the run's configuration with `{client}` for the client's number |
| `server-data` | the server's own file |
| `wait` | seconds that the server waits for all nodes before the first round |
| `timeout` | seconds that a node has for an answer |
| `poll` | most seconds between two looks for answers |
| `keys` | a JSON file of every client's public key, which the server reads and adds to |
"""

import shlex
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from pytorch_lightning import Trainer

from fl_lightning.cli.console import quiet_lightning
from fl_lightning.cli.main import FederatedCLI
from fl_lightning.cli.parser_only import parts_of
from fl_lightning.data import Elsewhere
from fl_lightning.engines import SequentialEngine
from fl_lightning.federation.checks import check_carried
from fl_lightning.federation.identity import OF_THE_DATA, shared_settings
from fl_lightning.flower.engine import RemoteEngine
from fl_lightning.flower.node import Node
from fl_lightning.flower.nodes import Nodes, schema_of_party

SHOWN = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
QUIET: dict[str, Any] = dict.fromkeys(SHOWN, False)
"""Settings of a Trainer that shows and writes nothing."""


class ServerCLI(FederatedCLI):
    """The command line of a federation whose clients are at nodes.

    Args:
        args: of `fl-lightning`.
        grid: Flower's.
        options: of the app.
    """

    def __init__(self, args: list[str], grid: Grid, options: Mapping[str, Any]) -> None:
        self._grid = grid
        self._options = options
        super().__init__(args)

    def before_fit(self) -> None:
        """Find the nodes, and let their clients be trained where they are."""
        super().before_fit()
        parts = self.model.parts
        settings = shared_settings(parts, self.datamodule, str(self.trainer.precision), self.trainer.max_epochs)
        options = self._options
        num_clients = self.datamodule.num_clients
        faults = parts.faults
        times = float(options.get("timeout", 600.0)), float(options.get("poll", 1.0))
        tolerant = faults.on_error == "skip"
        keys = options.get("keys") or None
        nodes = Nodes(self._grid, settings, num_clients, *times, tolerant, keys)
        nodes.wait(num_clients, float(options.get("wait", 60.0)), faults.min_clients)
        if isinstance(self.datamodule.source, Elsewhere):
            self.datamodule.source.sizes = nodes.sizes
        run = uuid4().hex if self.folder is None else sha256(str(self.folder.resolve()).encode()).hexdigest()[:16]

        def factory(local: SequentialEngine) -> RemoteEngine:
            check_carried(parts.client, parts.transforms, list(parts.batch_hooks), self.trainer)
            nodes.compare_schema(schema_of_party(self.datamodule, parts.client))
            return RemoteEngine(local, nodes, parts, settings, run)

        self.model.engine_factory = factory


def client_app(*configs: str | Path) -> ClientApp:
    """Make the app of the nodes.

    Args:
        configs: the federation's YAML files, a later one on top of an earlier.
    """
    app = ClientApp()
    files = tuple(map(str, configs))

    def answer(message: Message, context: Context) -> Message:
        try:
            with quiet_lightning():
                return node_of(files, *settings_of_node(context)).answer(message)
        except SystemExit as stop:  # of the parser, which has printed why
            raise ValueError("the node's YAML or arguments are refused, as its own log says; mend them") from stop

    for register in (app.train, app.evaluate, app.query):
        register()(answer)
    return app


def server_app(*configs: str | Path) -> ServerApp:
    """Make the app of the server: a fit with the same command line, checkpoints and run folder as a simulation's.

    Args:
        configs: the federation's YAML files, a later one on top of an earlier.
    """

    def main(grid: Grid, context: Context) -> None:
        options = context.run_config
        files = tuple(map(str, configs))
        with quiet_lightning():
            words = str(options.get("arguments", "")), str(options.get("server-data") or "")
            ServerCLI(command_line(files, *words), grid, options)

    app = ServerApp()
    app.main()(main)
    return app


def settings_of_node(context: Context) -> tuple[str, str, int | None]:
    """Look up the run's arguments, the node's own file, and the number of its client, where it is told."""
    run = context.run_config
    node = context.node_config
    number = node.get("partition-id")
    client_id = None if number is None else int(number)
    data = str(node.get("data") or str(run.get("data") or "").format(client=client_id))
    return str(run.get("arguments", "")), data, client_id


@lru_cache(maxsize=8)
def node_of(configs: tuple[str, ...], arguments: str, data_file: str, client_id: int | None = None) -> Node:
    """Make the node of a client of its files, once in a process.

    Args:
        configs: the federation's YAML files.
        arguments: more of the command line.
        data_file: the node's own; empty: it has all data, of which it reads its client's.
        client_id: of the client, where the data do not tell.

    Raises:
        ValueError: nothing tells which client it is.
    """
    made = parts_of(command_line(configs, arguments, data_file))
    trainer = made.config.fit.trainer
    data = made.datamodule
    client_id = getattr(data.partition, "client_id", client_id)
    if client_id is None:
        raise ValueError("a node must know its client, and has neither data nor partition-id; set --node-config data=…")
    where = Trainer(accelerator=trainer.accelerator, devices=trainer.devices, precision=trainer.precision, **QUIET)
    folder = Path(data_file).resolve().parent if data_file else Path("nodes", str(client_id))
    device = where.strategy.root_device
    plugin = where.precision_plugin
    return Node(made.model, data, client_id, folder / "memory", device, plugin, trainer.max_epochs)


def command_line(configs: tuple[str, ...], arguments: str, data_file: str) -> list[str]:
    """Join files and arguments as the command line of a fit, a party's own file last: it has the last word.

    Raises:
        ValueError: the arguments say something of the data that is the party's own.
    """
    words = shlex.split(arguments)
    names = [word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--data")]
    if data_file and (others := [name for name in names if name.removeprefix("data.") not in OF_THE_DATA]):
        raise ValueError(
            f"arguments of a run must leave to each party what its data are, but for {', '.join(OF_THE_DATA)}, got "
            f"{others[0]}; set it in its {Path(data_file).name}"
        )
    files = [word for name in configs for word in ("-c", name)]
    return ["fit", *files, *words, *(["-c", data_file] if data_file else [])]
