"""Checks of the arguments of a data module."""

from typing import Any

import torch

from fl_lightning.data.column_partition import ColumnPartition
from fl_lightning.data.datamodules import DataModuleSource
from fl_lightning.data.devices import Devices
from fl_lightning.data.division import Division
from fl_lightning.data.feature_shift import FeatureShift, check_shifted
from fl_lightning.data.owners import SplitElsewhere
from fl_lightning.data.partitions import IIDPartition, Partition
from fl_lightning.data.scenario import Scenario
from fl_lightning.data.sources import Source
from fl_lightning.data.splits import Split
from fl_lightning.data.stragglers import Stragglers
from fl_lightning.data.streams import StreamSplit
from fl_lightning.types import DataModule
from fl_lightning.utils.keyed import keyed_globals
from fl_lightning.utils.packages import is_of_lightning
from fl_lightning.utils.settings import check_count, check_kind, check_whole, described

OF_SIMULATIONS = {
    "feature_shift": None,
    "local_work": 1.0,
    "pooled": False,
    "devices": None,
    "scenario": None,
    "stays": None,
}
"""Settings of data that only a simulation has, by name, with the value of a setting that is not set."""


def as_source(given: Any, name: str = "source") -> Source:
    """Make a source of a data module, and return a source as it is.

    Args:
        given: What the user gave.
        name: Name of the argument, for the error.

    Raises:
        TypeError: It is neither a source nor a data module.
    """
    if isinstance(given, Source):
        return given
    if isinstance(given, type) and issubclass(given, Source):
        raise TypeError(f"{name} must be an instance, got {described(given)}; give {given.__name__}(...)")
    if isinstance(getattr(given, "source", None), Source) and isinstance(given, DataModule):
        raise TypeError(f"{name} must not be divided already, got {described(given)}; give its source")
    if isinstance(given, DataModule):
        return DataModuleSource(given)
    raise TypeError(
        f"{name} must be a source of fl_lightning.data, such as Digits(), or a LightningDataModule, got "
        f"{described(given)}; datasets are given by FederatedDataModule.from_datasets(train, test)"
    )


def as_sources(given: Any) -> dict[str, Source]:
    """Return the sources of further splits by name.

    Args:
        given: What the user gave. None: there are no further splits.

    Raises:
        TypeError: It is something else than sources by name.
    """
    check_kind(dict, "sources by the name of their split", "give such as {'proxy': Digits()}", extra_splits=given)
    return {name: as_source(source, f"extra_splits[{name!r}]") for name, source in (given or {}).items()}


def check_given(
    *, num_clients: object, batch_size: object, partition: object, seed: object, sampling_seed: object
) -> None:
    """Refuse arguments of a FederatedDataModule that are of another kind or out of range.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: An argument is out of its range.
    """
    if isinstance(num_clients, Partition):
        raise TypeError(
            f"num_clients must be a whole number, got {described(num_clients)}; give the partition by name: "
            f"partition=..."
        )
    check_kind(Partition, "a partition of fl_lightning.data", "give DirichletPartition(alpha=0.1)", partition=partition)
    check_count(1, num_clients=num_clients)
    if batch_size != "full":
        check_count(1, "'full' is the whole split", batch_size=batch_size)
    check_whole(seed=seed, sampling_seed=sampling_seed)


def check_parts(*, feature_shift: Any, devices: Any, scenario: Any) -> None:
    """Refuse parts of the data that are of another kind.

    Args:
        feature_shift: How the clients' samples differ, or None.
        devices: The devices of the clients, or None.
        scenario: How the clients' data change over the rounds, or None.

    Raises:
        TypeError: A part is of another kind.
    """
    check_kind(FeatureShift, "a FeatureShift", "give FeatureShift(noise=0.1)", feature_shift=feature_shift)
    check_kind(Devices, "a Devices", "give Devices(step_seconds=0.1)", devices=devices)
    check_kind(Scenario, "a scenario of fl_lightning.data", "give Window(per_round=0.1)", scenario=scenario)


def partition_of(partition: Partition | None, *, by: str | None, counts_owners: bool) -> Partition:
    """Choose the partition: the given one, that by the column of the owners, else IID.

    Args:
        partition: The partition. None: it is not given.
        by: Column that names the owners of the samples. None: it is not given.
        counts_owners: Whether the number of clients is to be the number of owners.

    Raises:
        ValueError: Both `partition` and `by` are given.
        TypeError: The owners must be counted, and nothing names them.
    """
    if partition is not None and by is not None:
        raise ValueError(
            f"data.by deals the samples by their owners, and data.partition otherwise, got by={by} and "
            f"{type(partition).__name__}; leave one of them out"
        )
    chosen = partition
    if chosen is None:
        chosen = IIDPartition() if by is None else ColumnPartition(by)
    if counts_owners and not chosen.counts_owners:
        raise TypeError(
            f"num_clients must be a whole number where nothing names the owners of the samples, got None with "
            f"{type(chosen).__name__}; leave it out for 10, or set data.by"
        )
    return chosen


def check_limited(source: Source, train: Split, division: Division) -> None:
    """Refuse stored positions of samples whose source leaves some of them out, and so numbers them anew.

    Args:
        source: The source of the samples.
        train: The training split.
        division: The division of the samples among the clients.

    Raises:
        ValueError: The partition stores positions, and the source's limit leaves samples out.
    """
    left_out = source.left_out.get("train", 0)
    if left_out and division.deals_stored_positions():
        raise ValueError(
            f"the stored positions of {type(division.partition).__name__} number all training samples, and "
            f"data.source.limit leaves {left_out} of {left_out + len(train)} out; leave out data.source.limit"
        )


def check_pooled(data: Any, train: Split) -> None:
    """Refuse to pool what cannot be at one place.

    Args:
        data: The data module.
        train: The training split.

    Raises:
        ValueError: A setting beside `pooled` contradicts it, or the samples cannot be pooled.
    """
    if not data.pooled:
        return
    if isinstance(data.local_work, Stragglers) and data.local_work.cuts:
        raise ValueError(
            "data.pooled lets one client make the batches of a cohort, and data.local_work with late=cut counts whole "
            "epochs of each client; set data.local_work.late to drop, or leave one of them out"
        )
    beside = ""
    if data.feature_shift is not None:
        beside = "data.feature_shift"
    elif isinstance(train, StreamSplit | SplitElsewhere):
        beside = "streams or samples of several owners"
    if beside:
        raise ValueError(
            f"data.pooled gives one client all samples as they are stored, which {beside} do not allow; leave one of "
            f"them out"
        )


def check_feature_shift(shift: FeatureShift | None, train: Split) -> None:
    """Refuse a shift that the first training sample cannot have, unless the samples are streams or of other parties.

    Args:
        shift: The shift. None: there is none.
        train: The training split.

    Raises:
        ValueError: The sample is of another shape or kind.
    """
    if shift is None or isinstance(train, StreamSplit | SplitElsewhere) or not len(train):
        return
    with keyed_globals(0, "items"):
        x = train.look_at(torch.arange(1))[0]
    check_shifted(x, as_images=bool(shift.rotation or shift.colour))


def check_scenario(data: Any, train: Split) -> None:
    """Refuse a scenario of samples that it cannot choose from, or beside a setting that it contradicts.

    Args:
        data: The data module.
        train: The training split.

    Raises:
        ValueError: There are streams or samples of several owners, the setting stands beside the scenario, or the
            scenario numbers samples of which the source's limit leaves some out.
    """
    if data.scenario is None:
        return
    left_out = data.source.left_out.get("train", 0)
    if left_out and data.scenario.stores_positions:
        raise ValueError(
            f"data.scenario {type(data.scenario).__name__} numbers all training samples, and data.source.limit leaves "
            f"{left_out} of {left_out + len(train)} out; leave out data.source.limit"
        )
    if isinstance(train, StreamSplit | SplitElsewhere):
        kind = "streams" if isinstance(train, StreamSplit) else "samples that stay with their owners"
        raise ValueError(
            f"data.scenario chooses among samples that are dealt to the clients, and these are {kind}; leave it out"
        )
    reasons = {
        "pooled": "puts the samples of all rounds and clients together",
        "feature_shift": "lets each client see its samples in one way",
    }
    for name, reason in reasons.items():
        if getattr(data, name):
            raise ValueError(
                f"data.{name} {reason}, and with data.scenario samples change over the rounds; leave one of them out"
            )


def check_simulated(data: Any) -> None:
    """Refuse settings that draw for all clients at one place, which a federation of several parties cannot do.

    Args:
        data: The data module.

    Raises:
        ValueError: Such a setting is set, or the number of clients is not.
    """
    for name, unset in OF_SIMULATIONS.items():
        given = getattr(data, name)
        if given != unset:
            raise ValueError(
                f"data.{name} belongs to simulations, and this federation's clients have data and time of their own, "
                f"got {given}; leave it out"
            )
    if not data.num_clients:
        raise ValueError("data.num_clients must be a number where each client has its own data, got None; set it")


def check_fitted(module: Any) -> None:
    """Refuse a module that would take the rounds for batches.

    Args:
        module: The module that a Trainer fits, or None.

    Raises:
        TypeError: The module is a LightningModule that no federation trains.
    """
    # A FederatedLoop has the first attribute. A ClientModule has the second one, and refuses to be fitted itself.
    is_federated = hasattr(module, "client_modules") or hasattr(module, "lightning_modules")
    if is_of_lightning(module, "LightningModule") and not is_federated:
        name = type(module).__name__
        raise TypeError(
            f"a FederatedDataModule gives rounds, which a FederatedLoop takes, and {name} takes batches; fit "
            f"FederatedLoop({name}(...)), or give the Trainer your own data module"
        )
