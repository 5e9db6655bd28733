"""The options `--new` and `--output` of `predict`: new samples, and the file of their predictions."""

import os
from pathlib import Path
from typing import Any

from fl_lightning.data import FederatedDataModule
from fl_lightning.data.new_samples import check_new_path
from fl_lightning.data.stored_schema import has_schema, read_schema
from fl_lightning.federation.checkpoint import check_weights_file
from fl_lightning.utils.files import is_there
from fl_lightning.utils.text import slug

OPTIONS_OF_EVALUATION = ("client", "tuned", "new", "output")
"""Options that say what is evaluated and where the answer goes. They are no settings of the run."""

PREDICTIONS = "predictions"
"""Name of the files of predictions, without their endings."""

ENDINGS = (".gz", ".bz2", ".xz", ".zip")
"""Endings of compressed files, before which stands another ending."""


def settings_of(config: Any) -> dict[str, Any]:
    """Return the settings of a run in a parsed configuration, without the options of an evaluation."""
    return {name: value for name, value in config.as_dict().items() if name not in OPTIONS_OF_EVALUATION}


def allowed_changes(config: Any) -> list[str]:
    """Return the names of the settings that may differ from those of the run, each with all settings below it.

    The settings of the source then say how a new file is written. The samples of the run are not read by them.
    """
    names = [name.replace(".init_args", "").removesuffix(".class_path") for name in config.allow_changes]
    if config.get("new") is not None:
        names.append("data.source")
    return names


def check_request(config: Any) -> None:
    """Refuse `--new` without what it needs, before anything is read.

    Args:
        config: The parsed configuration of `predict`.

    Raises:
        FileNotFoundError: There are no such samples, or no such weights.
        ValueError: `--new` lacks a checkpoint, or `--output` is no csv file.
    """
    if config.new is not None:
        check_new_path(Path(config.new).expanduser())
        weights = config.model.initial_weights
        if not config.ckpt_path and weights:
            check_weights_file(Path(weights))
        elif not config.ckpt_path:
            raise ValueError(
                f"--new needs --ckpt_path, because a checkpoint has the schema that reads {config.new}; add "
                f"--ckpt_path best"
            )
    if config.output is not None and Path(config.output).suffix != ".csv":
        raise ValueError(f"--output must be a file that ends with .csv, got {config.output}; write predictions.csv")


def output_of(config: Any, folder: Path) -> Path:
    """Return the csv file of predictions. Predictions of test samples replace earlier ones, all others do not.

    Args:
        config: The parsed configuration of `predict`.
        folder: The run's folder, or the folder of the runs if no run is known.

    Raises:
        ValueError: The file, or the file of the outputs beside it, exists already.
    """
    if config.output is not None:
        path = Path(config.output).expanduser()
    elif config.new is not None:
        path = folder / f"{PREDICTIONS}-{stem_of(Path(config.new).expanduser())}{of_client(config.client)}.csv"
    else:
        return folder / f"{PREDICTIONS}{of_client(config.client)}.csv"
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--output must be a file in a folder that can be written, got {path}; name another folder")
    for file in (path, path.with_suffix(".pt")):
        if is_there(file):
            raise ValueError(f"{file} exists already, and predict does not replace it; name another file by --output")
    return path


def of_client(client: int | str | None) -> str:
    """Return the end of the name of a file of a client's predictions, so that it does not replace the global model's.

    >>> of_client(3), of_client("all"), of_client(None)
    ('-client-3', '-clients', '')

    Args:
        client: The client as the command line names it.
    """
    if client is None:
        return ""
    return "-clients" if client == "all" else f"-client-{slug(str(client))}"


def clients_to_predict(data: FederatedDataModule) -> list[int]:
    """Return the ids of the clients whose models predict: those with test samples, or all if others are predicted.

    Args:
        data: The data module, which this function sets up.

    Raises:
        ValueError: No client has test samples.
    """
    data.prepare_data()
    data.setup("predict")
    clients = list(range(data.num_clients))
    if data.predicts_others:
        return clients
    tested = [client_id for client_id in clients if data.has_test_samples(client_id)]
    if not tested:
        raise ValueError("client all needs test samples of a client, and none has any; give the data a test split")
    return tested


def stem_of(path: Path) -> str:
    """Return the name of a file without its endings, or the name of a folder.

    >>> stem_of(Path("ward/may.csv.gz")), stem_of(Path("v1.2.csv"))
    ('may', 'v1.2')
    """
    path = path.resolve()
    if path.is_dir():
        return path.name
    if path.suffix.lower() in ENDINGS:
        path = path.with_suffix("")
    return path.stem


def read_new(config: Any, data: FederatedDataModule) -> None:
    """Read the new samples by the schema in the checkpoint, which lets the training samples be.

    The samples of a user's `predict_dataloader` are new ones, too.

    Args:
        config: The parsed configuration of `predict`, whose `ckpt_path`, or else `model.initial_weights`, is a file.
        data: The data module, whose source reads the samples.

    Raises:
        ValueError: The checkpoint has no schema, or the samples do not fit it.
    """
    path = config.ckpt_path or config.model.initial_weights
    if config.new is not None and not config.ckpt_path and config.client is not None:
        # The model alone knows no clients. Their samples tell.
        data.predict_new(config.new, read_schema(path))
    elif config.new is not None:
        data.rely_on(path)
        data.predict_new(config.new)
    elif path and data.source.predicts_alone and has_schema(path):
        data.rely_on(path)
