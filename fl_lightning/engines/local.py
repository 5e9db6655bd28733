"""An engine for whoever has no Trainer: a client's app in a real federation, a script, a test."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from pytorch_lightning.plugins.precision import Precision

from fl_lightning.client.hooks import hooks
from fl_lightning.client.module import ClientModule
from fl_lightning.client.services import ClientServices, attach_services
from fl_lightning.data import FederatedDataModule
from fl_lightning.engines.cohort import CohortEngine
from fl_lightning.engines.execution import Execution
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.engines.settings import LocalSettings, decay_of
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.types import Member, Members
from fl_lightning.utils.keyed import keyed_seed


def local_engine(
    client: ClientModule,
    data: FederatedDataModule,
    device: torch.device | None = None,
    precision: Precision | None = None,
    max_epochs: int | None = None,
    settings: LocalSettings | None = None,
    personal: tuple[str, ...] = (),
    keep: tuple[str, ...] = (),
    chunk: Literal["auto"] | int = 1,
    members: Callable[[GlobalWeights], Iterable[Member]] | None = None,
) -> SequentialEngine:
    """Make an engine that trains clients as a `FederatedLoop` with the same settings does, in every bit.

    The net is built for the data with the first weights of the run, and the client's hooks are called up to
    `on_train_start`. A client's data are `data.view(client_id, round_idx)`.

    Args:
        client: the module that every client is trained in.
        data: of the federation.
        device: that clients are trained on; None: the CPU.
        precision: a plugin of Lightning's, such as `DoublePrecision()`; None: 32-true.
        max_epochs: rounds of the run, over which a decay of the learning rate may go; None: not known.
        settings: of local training; its seed is that of the run.
        personal: patterns of entries that are never transmitted.
        keep: patterns of buffers with `persistent=False` that a client keeps.
        chunk: clients trained at once, or `auto`.
        members: gives, of the entries in the client, the members of a round that go with the engine; None: those of
            the entries and the structure.

    Raises:
        ValueError: settings that do not go with client or data.
    """
    device = device or torch.device("cpu")
    precision = precision or Precision()
    settings = settings or LocalSettings()
    settings = replace(settings, lr_decay=decay_of(settings.lr_decay, max_epochs))
    data.prepare_data()
    data.setup("fit")
    data.key_batches(settings.seed)
    modules = client.lightning_modules()
    services = ClientServices()
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
        Execution(chunk=chunk).lay_out(client, device, str(precision.precision))
        weights = GlobalWeights(client, personal, keep)
        parts = client, settings, weights, services, device, precision, getattr(data.source, "datamodule", None)
        make: Callable[..., SequentialEngine] = SequentialEngine if chunk == 1 else partial(CohortEngine, chunk=chunk)
        engine = make(*parts, members=None if members is None else Members(members(weights)))
        data.to(device, early=not engine.local.transfer.moves)
        for name in ("on_fit_start", "on_train_start"):
            for hook in hooks(modules, name):
                hook()
    return engine
