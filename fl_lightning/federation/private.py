"""Checks that refuse what a guarantee of differential privacy does not cover."""

from collections.abc import Sequence

from pytorch_lightning import LightningModule
from torchmetrics import Metric

from fl_lightning.aggregation import Aggregator, ServerModule, UpdateTransform
from fl_lightning.client import ClientModule
from fl_lightning.client.hooks import overridden
from fl_lightning.client.metric_states import counting_by_name
from fl_lightning.client.modes import BATCH_NORMS
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.stragglers import Stragglers
from fl_lightning.members.faults import FaultPolicy
from fl_lightning.metrics.history import History
from fl_lightning.types import Sent, TrainableModule

RELEASED: frozenset[Sent] = frozenset({"weights", "personal means"})
"""Contents that a client may send to a private aggregator, which adds noise to weights.

A private run takes no personal means.
"""


def check_private_rule(
    *,
    client: ClientModule,
    rule: Aggregator,
    server_module: ServerModule,
    transforms: Sequence[UpdateTransform],
    data: FederatedDataModule,
) -> None:
    """Refuse what the guarantee of a private aggregator does not cover: other ways from a client to the server.

    Args:
        client: The client module.
        rule: The private aggregator.
        server_module: The server module.
        transforms: The transforms of updates.
        data: The data module.

    Raises:
        ValueError: The cohorts are not drawn by Poisson sampling, or the server gets more of a client than the weights.
    """
    name = type(rule).__name__
    if isinstance(data.local_work, Stragglers) and data.local_work.drops:
        raise ValueError(
            f"the guarantee of {name} needs clients that are drawn independently, and data.local_work drops a share of "
            f"each cohort; set data.local_work.late to cut, or leave data.local_work out"
        )
    if data.cohort.sampling_rate is None:
        how = "are those of data.schedule" if data.schedule is not None else "have a fixed size"
        raise ValueError(
            f"the guarantee of {name} needs clients that are drawn independently, and the cohorts here {how}; "
            f"set data.sampling to poisson, or data.participation to 1 for all clients in every round"
        )
    check_not_asked(rule, server_module)
    # Such a method sends weights only, and its server only averages.
    is_fedavg = client.is_fedavg_equivalent and type(server_module) is client.server_class
    others = sorted(client.sends - RELEASED)
    if others and not is_fedavg:
        kind = type(client).__name__
        raise ValueError(
            f"{name} adds noise to what the weights of a client moved, and {kind} also sends {' and '.join(others)}, "
            f"which would reach the server as they are; take another method, such as FedAvg, FedProx or FedNTD, or "
            f"leave model.aggregator unset"
        )
    if overridden(server_module, "add", ServerModule) and not is_fedavg:
        raise ValueError(
            f"{name} adds noise to the sum of all clients, and {type(server_module).__name__} takes in each client's "
            f"update before it; take a method whose server only averages, or leave model.aggregator unset"
        )
    for transform in transforms:
        if overridden(transform, "state_dict", UpdateTransform):
            raise ValueError(
                f"{name} bounds what one client can change, and {type(transform).__name__} keeps something of each "
                f"for the others to come; leave it out of model.transforms"
            )


def check_first_fit(history: History) -> None:
    """Refuse a second fit of a private federation from round 0, which would draw the same noise again.

    Args:
        history: The rows of all rounds of the loop.

    Raises:
        ValueError: The federation has run rounds already.
    """
    num_rounds = len(history)
    if num_rounds:
        raise ValueError(
            f"a private federation that has run {num_rounds} rounds cannot begin at round 0 again: the same noise on "
            f"other weights would take itself away; make a new FederatedLoop with another seed, or continue by "
            f"ckpt_path"
        )


def check_private_client(client: ClientModule, faults: FaultPolicy) -> None:
    """Refuse settings of faults that drop a message of a private client after its arrival.

    The ε of the client would not count the message.

    Args:
        client: The client module.
        faults: The policy of faults.

    Raises:
        ValueError: A setting drops messages that have arrived.
    """
    setting = ""
    if faults.min_clients > 1:
        setting = f"min_clients={faults.min_clients}"
    elif faults.max_update_norm is not None:
        setting = f"max_update_norm={faults.max_update_norm}"
    elif faults.nonfinite == "skip":
        setting = f"nonfinite={faults.nonfinite}"
    if setting:
        raise ValueError(
            f"{type(client).__name__} counts what it has sent, and model.faults.{setting} drops messages that have "
            f"arrived, and their count with them; leave it unset (model.faults.on_error may be skip)"
        )


def check_not_asked(private: Aggregator | ClientModule, server_module: ServerModule) -> None:
    """Refuse a server module that asks clients for more than their weights, which no guarantee covers.

    Args:
        private: The private aggregator, or the private client.
        server_module: The server module.

    Raises:
        ValueError: The server module has an inquiry.
    """
    if server_module.inquiry is None:
        return
    name = type(private).__name__
    kind = type(server_module).__name__
    asked = " and ".join(sorted(server_module.inquiry.sends))
    raise ValueError(
        f"the guarantee of {name} covers the weights that clients send, and {kind} also asks them for {asked}, which "
        f"would reach the server as they are; leave model.server_module unset"
    )


def check_private_faults(faults: FaultPolicy, rule: str) -> None:
    """Refuse settings of faults that reveal something about clients to a private aggregator.

    Args:
        faults: The policy of faults.
        rule: Name of the private aggregator.

    Raises:
        ValueError: A setting shows how many clients took part, or whose update was long.
    """
    if faults.min_clients > 1:
        raise ValueError(
            f"{rule} hides how many clients took part, which model.faults.min_clients={faults.min_clients} would show; "
            f"leave it unset"
        )
    if faults.max_update_norm is not None:
        raise ValueError(
            f"{rule} clips every update, and model.faults.max_update_norm={faults.max_update_norm} would tell whose "
            f"was long; leave it unset"
        )


def check_samples_apart(client: ClientModule) -> None:
    """Refuse parts of a net that mix the samples of a batch, or that keep values of single samples.

    Raises:
        ValueError: The net has a BatchNorm layer or a metric object.
    """
    for name, part in client.named_modules():
        if isinstance(part, BATCH_NORMS):
            raise ValueError(
                f"dp_sgd bounds the gradient of each sample, which {type(part).__name__} {name!r} makes of the "
                f"whole batch; take GroupNorm or LayerNorm"
            )
    for name, counting in counting_by_name(client).items():
        if isinstance(counting, Metric):
            raise ValueError(
                f"dp_sgd lets nothing of single samples out of a step, and {name!r} is a metric object, which counts "
                f"them; leave it out, or set model.metrics"
            )


def check_hooks_apart(client: LightningModule | TrainableModule) -> None:
    """Refuse hooks that get a whole batch before the gradients of its samples are taken.

    Raises:
        ValueError: The client or its module overrides such a hook.
    """
    module = getattr(client, "module", None) or client
    for name in ("on_before_batch_transfer", "on_after_batch_transfer"):
        if overridden(module, name):
            raise ValueError(
                f"dp_sgd bounds the gradient of each sample of a batch, and {type(module).__name__}.{name} may make a "
                f"sample of several before that; transform single samples in the data, and leave the hook out"
            )
