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

import io
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO
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
from fl_lightning.federation.horizon import round_limit
from fl_lightning.federation.identity import OF_THE_DATA, shared_settings
from fl_lightning.flower.engine import RemoteEngine
from fl_lightning.flower.node import Node
from fl_lightning.flower.nodes import Nodes, schema_of_party

SHOWN = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
"""Names of the settings of a Trainer that show or write something."""

LONGEST = 2000
"""Number of characters that are remembered of what is printed."""

QUIET: dict[str, Any] = dict.fromkeys(SHOWN, False)
"""Settings of a Trainer that shows and writes nothing."""


class ServerCLI(FederatedCLI):
    """The command line of a federation whose clients are at nodes.

    Args:
        args: Arguments of `fl-lightning`.
        grid: Flower's connection to the nodes.
        options: Settings of the app, by name.
    """

    def __init__(self, args: list[str], grid: Grid, options: Mapping[str, Any]) -> None:
        self._grid = grid
        self._options = options
        super().__init__(args)

    def before_fit(self) -> None:
        """Find the nodes, and let their clients be trained where they are."""
        super().before_fit()
        parts = self.model.parts
        parts.horizon.begin_run(self.trainer.max_epochs, self.trainer.max_steps)
        settings = shared_settings(
            parts,
            self.datamodule,
            precision=str(self.trainer.precision),
            planned=parts.horizon.planned,
        )
        nodes = self._find_nodes(settings)
        if isinstance(self.datamodule.source, Elsewhere):
            self.datamodule.source.sizes = nodes.sizes
        run = name_of_run(self.folder)

        def factory(local: SequentialEngine) -> RemoteEngine:
            check_carried(
                transforms=parts.transforms,
                batch_hooks=list(parts.batch_hooks),
                trainer=self.trainer,
            )
            nodes.compare_schema(schema_of_party(self.datamodule, parts.client))
            engine = RemoteEngine(local=local, nodes=nodes, parts=parts, settings=settings, run=run)
            engine.scoring_after = self.model.scoring_after
            return engine

        self.model.engine_factory = factory

    def _find_nodes(self, settings: Mapping[str, str]) -> Nodes:
        """Wait for the nodes of the clients.

        Args:
            settings: Digests of the settings that all parties must have alike, by name.
        """
        options = self._options
        num_clients = self.datamodule.num_clients
        faults = self.model.parts.faults
        nodes = Nodes(
            grid=self._grid,
            settings=settings,
            num_clients=num_clients,
            timeout=float(options.get("timeout", 600.0)),
            poll=float(options.get("poll", 1.0)),
            tolerant=faults.on_error == "skip",
            keys=options.get("keys") or None,
        )
        nodes.wait(num_clients, seconds=float(options.get("wait", 60.0)), least=faults.min_clients)
        return nodes


def name_of_run(folder: Path | None) -> str:
    """Name a run for the files of its nodes, so that a run that continues in its folder has the same name.

    Args:
        folder: Folder of the run. None is a run without a folder, which gets a name of its own.
    """
    if folder is None:
        return uuid4().hex
    path = str(folder.resolve())
    return sha256(path.encode()).hexdigest()[:16]


def client_app(*configs: str | Path) -> ClientApp:
    """Make the app of the nodes.

    Args:
        configs: The federation's YAML files. A later file overrides an earlier file.
    """
    app = ClientApp()
    files = tuple(map(str, configs))

    def answer(message: Message, context: Context) -> Message:
        arguments, data_file, client_id = settings_of_node(context)
        with quiet_lightning(), refusals_as_errors("a node"):
            node = node_of(files, arguments=arguments, data_file=data_file, client_id=client_id)
            return node.answer(message)

    for register in (app.train, app.evaluate, app.query):
        register()(answer)
    return app


def server_app(*configs: str | Path) -> ServerApp:
    """Make the app of the server: a fit with the same command line, checkpoints and run folder as a simulation's.

    Args:
        configs: The federation's YAML files. A later file overrides an earlier file.
    """
    files = tuple(map(str, configs))

    def main(grid: Grid, context: Context) -> None:
        options = context.run_config
        with quiet_lightning(), refusals_as_errors("the server"):
            args = command_line(
                files,
                arguments=str(options.get("arguments", "")),
                data_file=str(options.get("server-data") or ""),
            )
            ServerCLI(args, grid=grid, options=options)

    app = ServerApp()
    app.main()(main)
    return app


class Remembered(io.TextIOBase):
    """Writes a text on, and remembers its end.

    Args:
        stream: The stream on which the text is written.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self.end = ""

    def write(self, text: str) -> int:
        self.end = f"{self.end}{text}"[-LONGEST:]
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding


@contextmanager
def refusals_as_errors(who: str) -> Iterator[None]:
    """Raise what the command line refuses as an error, because Flower shows no text of an app that exits.

    Args:
        who: Who has the command line.

    Raises:
        ValueError: The command line has printed a refusal and has exited.
    """
    printed = Remembered(sys.stderr)
    try:
        with redirect_stderr(printed):
            yield
    except SystemExit as stop:
        if not stop.code:
            raise
        # Python prints a text in place of a code, but only at the end of the process.
        text = stop.code if isinstance(stop.code, str) else printed.end
        lines = text.strip().splitlines() or [f"it exited with code {stop.code}"]
        raise ValueError(f"{who} cannot take its YAML and arguments: {lines[-1]}") from stop


def settings_of_node(context: Context) -> tuple[str, str, int | None]:
    """Look up the run's arguments, the node's own file, and the id of its client, or None if nothing tells the id."""
    run = context.run_config
    node = context.node_config
    number = node.get("partition-id")
    client_id = None if number is None else int(number)
    arguments = str(run.get("arguments", ""))
    data_of_run = str(run.get("data") or "").format(client=client_id)
    data_file = str(node.get("data") or data_of_run)
    return arguments, data_file, client_id


@lru_cache(maxsize=8)
def node_of(configs: tuple[str, ...], arguments: str, data_file: str, client_id: int | None = None) -> Node:
    """Make the node of a client from its files, once in a process.

    Args:
        configs: The federation's YAML files.
        arguments: Further words of the command line.
        data_file: The node's own file. An empty name means that the node has all data and reads its client's.
        client_id: Id of the client, if the data do not tell it.

    Raises:
        ValueError: Neither the data nor `client_id` tell the client.
    """
    made = parts_of(command_line(configs, arguments=arguments, data_file=data_file))
    trainer = made.config.fit.trainer
    data = made.datamodule
    client_id = getattr(data.partition, "client_id", client_id)
    if client_id is None:
        raise ValueError("a node must know its client, and has neither data nor partition-id; set --node-config data=…")
    where = Trainer(accelerator=trainer.accelerator, devices=trainer.devices, precision=trainer.precision, **QUIET)
    folder = Path(data_file).resolve().parent if data_file else Path("nodes", str(client_id))
    return Node(
        loop=made.model,
        data=data,
        client_id=client_id,
        folder=folder / "memory",
        device=where.strategy.root_device,
        precision=where.precision_plugin,
        max_epochs=round_limit(trainer.max_epochs, trainer.max_steps),
    )


def command_line(configs: tuple[str, ...], arguments: str, data_file: str) -> list[str]:
    """Join files and arguments to the command line of a fit. A party's own file is last and overrides the others.

    Args:
        configs: The federation's YAML files.
        arguments: Further words of the command line.
        data_file: The party's own file, empty without one.

    Raises:
        ValueError: The arguments have a setting of the data that is the party's own.
    """
    words = shlex.split(arguments)
    if data_file:
        check_leaves_data(words, data_file)
    args = ["fit"]
    for name in configs:
        args += ["-c", name]
    args += words
    if data_file:
        args += ["-c", data_file]
    return args


def check_leaves_data(words: Iterable[str], data_file: str) -> None:
    """Refuse settings of the data that each party has in a file of its own.

    Args:
        words: Words of the command line.
        data_file: The party's own file.

    Raises:
        ValueError: A word has such a setting.
    """
    for word in words:
        if not word.startswith("--data"):
            continue
        option, _, _ = word.partition("=")
        name = option.removeprefix("--")
        if name.removeprefix("data.") not in OF_THE_DATA:
            raise ValueError(
                f"arguments of a run must leave to each party what its data are, but for {', '.join(OF_THE_DATA)}, got "
                f"{name}; set it in its {Path(data_file).name}"
            )
