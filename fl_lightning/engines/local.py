"""An engine without a Trainer, for a client's app in a real federation, a script or a test."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

import torch
from pytorch_lightning.plugins.precision import Precision

from fl_lightning.aggregation import Inquiry
from fl_lightning.client.hooks import hooks
from fl_lightning.client.module import ClientModule
from fl_lightning.client.services import ClientServices, attach_services
from fl_lightning.data import FederatedDataModule
from fl_lightning.engines.clock import ClientClock, begin_without_trainer
from fl_lightning.engines.cohort import CohortEngine
from fl_lightning.engines.execution import Execution
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.engines.settings import LocalSettings
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.types import Member, Members
from fl_lightning.utils.keyed import keyed_seed


def local_engine(
    client: ClientModule,
    data: FederatedDataModule,
    *,
    device: torch.device | None = None,
    precision: Precision | None = None,
    max_epochs: int | None = None,
    settings: LocalSettings | None = None,
    personal: tuple[str, ...] = (),
    keep: tuple[str, ...] = (),
    chunk: Literal["auto"] | int = 1,
    members: Callable[[GlobalWeights], Iterable[Member]] | None = None,
    rounds: Callable[[], int | None] | None = None,
    inquiry: Inquiry | None = None,
) -> SequentialEngine:
    """Return an engine that trains clients as a `FederatedLoop` with the same settings does, in every bit.

    The net is built for the data with the first weights of the run, and the client's hooks are
    called up to `on_train_start`. A client's data are `data.view(client_id, round_idx)`.

    Args:
        client: The module in which every client is trained.
        data: The data module of the federation.
        device: The device on which clients are trained. None is the CPU.
        precision: A precision plugin of Lightning, such as `DoublePrecision()`. None is `32-true`.
        max_epochs: Number of rounds of the run, over which the learning rate may decay and the
            client's schedules go. None if it is not known.
        settings: Settings of local training, with the seed of the run. None takes the defaults.
        personal: `fnmatch` patterns of entries that are never transmitted.
        keep: `fnmatch` patterns of buffers with `persistent=False` that a client keeps.
        chunk: Number of clients that are trained at once, ≥ 1, or `auto`.
        members: Makes the members of a round that act at the client, given the entries of the
            client. None takes the members of the entries and a check of the module's structure.
        rounds: Returns the number of rounds of the run when the client's module asks for it. None
            returns `max_epochs`.
        inquiry: What answers the further exchange of a server module. None: there is no such exchange.

    Raises:
        ValueError: A setting does not fit the client or the data.
    """
    device = device or torch.device("cpu")
    precision = precision or Precision()
    settings = (settings or LocalSettings()).over(max_epochs)
    data.prepare_data()
    data.setup("fit")
    data.key_batches(settings.seed)
    modules = client.lightning_modules()
    clock = ClientClock(settings, rounds=rounds or (lambda: max_epochs))
    begin_without_trainer(client, clock, datamodule=data, precision=str(precision.precision))
    services = ClientServices()
    make: Callable[..., SequentialEngine] = SequentialEngine
    if chunk != 1:
        make = partial(CohortEngine, chunk=chunk)
    with attach_services(modules, services.methods):
        for hook in hooks(modules, "setup"):
            hook("fit")
        with precision.module_init_context():
            torch.default_generator.manual_seed(keyed_seed(settings.seed, "weights"))
            if client.module is None:
                client.build(data.num_classes, data.input_shape)
            else:
                client.module.configure_model()
        precision.convert_module(client).to(device)
        Execution(chunk=chunk).lay_out(client, device=device, precision=str(precision.precision))
        global_weights = GlobalWeights(client, personal=personal, keep=keep)
        engine = make(
            client=client,
            settings=settings,
            global_weights=global_weights,
            services=services,
            device=device,
            precision=precision,
            datamodule=getattr(data.source, "datamodule", None),
            members=None if members is None else Members(members(global_weights)),
            clock=clock,
            inquiry=inquiry,
        )
        # The data move to the device first, unless a hook of the user sees batches before.
        data.to(device, early=not engine.local.transfer.moves)
        for name in ("on_fit_start", "on_train_start"):
            for hook in hooks(modules, name):
                hook()
    return engine
