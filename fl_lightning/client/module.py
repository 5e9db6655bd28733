"""Base class of clients: a LightningModule with the hooks that a method overrides, and helpers."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from pytorch_lightning import Callback, LightningModule
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning.aggregation import Inquiry, ServerModule
from fl_lightning.client.checkpoint_io import CheckedLoading
from fl_lightning.client.checks import (
    can_be_fedavg_equivalent,
    check_client_arguments,
    check_method_around_module,
    check_returned,
    made_net,
    num_arguments,
    same_or_unset,
    sets_hooks,
    uncompiled,
)
from fl_lightning.client.context import ClientContext
from fl_lightning.client.given_optimizers import set_optimizers
from fl_lightning.client.metric_states import parts_that_count, silent_metrics
from fl_lightning.client.modes import evaluation_mode
from fl_lightning.client.services import BatchTransfer
from fl_lightning.client.standalone import StandaloneClient
from fl_lightning.client.teacher import Teacher
from fl_lightning.functional.importance import as_function
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.functional.state import to_float32
from fl_lightning.nets import Backbone, HeterogeneousNets, NetFactory, Perceptron
from fl_lightning.types import (
    Batch,
    Broadcast,
    ClientData,
    ClientUpdate,
    ForwardContext,
    OptimizerFactory,
    Phase,
    Read,
    Sent,
    State,
    TrainableModule,
)
from fl_lightning.utils.batches import joined_rows
from fl_lightning.utils.devices import copy_to_device
from fl_lightning.utils.signatures import check_overrides, checks_arguments, document_arguments_of

ONE_PHASE = (Phase(),)
"""The phases of most methods: one, in which everything is trained."""


class ClientModule(CheckedLoading):
    """Trains as a client of the federation. The class itself is the client of FedAvg.

    It is built around a net, a classifier that is trained with cross-entropy, or around any LightningModule. The
    `training_step` of that module is then the local loss, and its `configure_optimizers` makes the local optimizer.

    Args:
        net: A factory `(num_classes, input_shape) -> net`. None makes a small perceptron.
        module: A LightningModule that is trained in place of a net.
        optimizer: A factory of the local optimizer, called anew for every client and round. None takes the module's
            `configure_optimizers`, and makes SGD(lr=0.01, momentum=0.9) for a net.
        lr_scheduler: A factory `optimizer -> scheduler` of the scheduler of `optimizer`, for a module. Both together
            take the place of the module's `configure_optimizers`, as the sections of these names do with LightningCLI.
        num_classes: The number of classes C. None takes it from the data.
        input_shape: The shape of one sample. None takes it from the data.

    Attributes:
        server_class: The server side of the method.
        exchanges: The names of the exchanges of a round, in order.
        needs: The conditions of the method: names of splits, `logits` (a net, not a module), `accumulated_lr` (an
            optimizer for which E_i is defined: SGD) or `clients` (several clients, not one with all samples). They are
            checked at the start.
        own_start: Whether clients train from models of their own, which they keep or the server makes for each, and not
            from the global model. What acts on one global model, or on what moved from it, is then refused.
        needs_fine_tuning: Whether the global model means nothing before a client has fine-tuned it. A fit without
            `model.fine_tuning` says so, and so do predictions and reports of the global model.
        stackable: Whether an engine may train several clients at once. It counts only in the class that sets it.
        own_gradients: Whether a training step takes gradients itself, or trains parameters that are none of the
            module's. `dp_sgd` refuses such a method.
        sends: The kinds of what goes up to the server.
        changes: The names of extras that are changes of a state over the trained entries. A codec with feedback codes
            them.
        reads: The kinds of what is read of the client's training data besides the batches of its training steps.
        is_private: Whether the messages of a client hide its samples.
        sends_counts: Whether the client's numbers of samples and steps go up.
        fedavg_equivalent: Coefficients by name at which the method is FedAvg, bit for bit. At these values only
            `local_loss` is called.
        may_be_fedavg_equivalent: Whether the class can be FedAvg at some coefficients.
        outputs: The outputs of the wrapped module's last `training_step` besides the loss.

    Raises:
        ValueError: `module` was given together with `net`, or `lr_scheduler` without `module` and `optimizer`. What a
            method needs of a module, a loop checks.
        TypeError: `module` is not a LightningModule, or has no `training_step`.
    """

    server_class: ClassVar[type[ServerModule]] = ServerModule
    exchanges: ClassVar[tuple[str, ...]] = ("train",)
    needs: ClassVar[frozenset[str]] = frozenset()
    own_start: ClassVar[bool] = False
    needs_fine_tuning: ClassVar[bool] = False
    stackable: ClassVar[bool] = False
    own_gradients: ClassVar[bool] = False
    sends: frozenset[Sent] = frozenset({"weights"})
    changes: ClassVar[frozenset[str]] = frozenset()
    reads: frozenset[Read] = frozenset()
    is_private: bool = False
    sends_counts: bool = True
    fedavg_equivalent: ClassVar[Mapping[str, float]] = {}

    @checks_arguments
    def __init__(
        self,
        net: NetFactory | None = None,
        *,
        module: LightningModule | TrainableModule | None = None,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
        lr_scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        num_classes: int | None = None,
        input_shape: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self.may_be_fedavg_equivalent = can_be_fedavg_equivalent(self)
        self._has_own_step = type(self).training_step is not ClientModule.training_step
        self.module = cast(LightningModule | None, uncompiled(module))
        check_client_arguments(
            self,
            module=self.module,
            num_classes=num_classes,
            input_shape=input_shape,
            net=net,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
        )
        self.net: Backbone | None = None
        self.net_factory: NetFactory = net or Perceptron
        self.optimizer_factory: OptimizerFactory = optimizer or partial(SGD, lr=0.01, momentum=0.9)
        self.scheduler_factory = lr_scheduler
        self.has_given_optimizer = optimizer is not None
        """Whether `optimizer_factory` was given, and is not the default of a net."""
        self.num_classes = num_classes
        self.input_shape = None if input_shape is None else tuple(input_shape)
        self.context = ClientContext()
        self.forward_context: ForwardContext = nullcontext
        self.outputs: dict[str, Any] = {}
        self._transfer: BatchTransfer | None = None
        self._teachers: dict[str, Teacher] = {}
        self._parameter_owners: list[tuple[str, nn.Module, str]] = []
        """The trainable parameters: name, the module that has it, and its name there."""
        self._personal: frozenset[str] = frozenset()
        self._own_step: Any = None
        """The `training_step` that is set on the wrapped module itself, or None, when its arguments were counted."""
        self._num_arguments = 0
        """The number of positional arguments of the wrapped module's `training_step`. 0: they are not counted yet."""
        if self.module is not None:
            self.automatic_optimization = self.module.automatic_optimization
            if optimizer is not None:
                set_optimizers(self.module, optimizer, lr_scheduler)
        elif num_classes is not None and input_shape is not None:
            self.build(self.num_classes, self.input_shape)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_overrides(cls)
        document_arguments_of(cls, ClientModule)

    def build(self, num_classes: int | None, input_shape: tuple[int, ...] | None) -> None:
        """Build the net, once the data are known. A net that is built already stays.

        Args:
            num_classes: The number of classes in the data. None: the data do not know it.
            input_shape: The shape of a sample in the data. None: the data do not know it.

        Raises:
            ValueError: A value that the constructor was given differs from that of the data, or a value is unknown.
        """
        if self.module is not None:
            return
        self.num_classes = same_or_unset(self, "num_classes", given=self.num_classes, known=num_classes)
        self.input_shape = same_or_unset(self, "input_shape", given=self.input_shape, known=input_shape)
        if self.net is None:
            self.net = made_net(self.net_factory, num_classes=self.num_classes, input_shape=self.input_shape)

    # --- hooks of a method -------------------------------------------------------------------------------------

    def is_personal(self, name: str, owner: nn.Module) -> bool:
        """Return True for an entry of the state dict that is never transmitted.

        Args:
            name: The name of the entry.
            owner: The module that has the entry.
        """
        return False

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        """Prepare for an exchange, once its weights are loaded: make teachers, masks, round buffers.

        The hook may pass over the local data (`over`), and move the starting point by editing the module's weights.

        Args:
            broadcast: The message of the server.
            local: The client's data.
        """

    def training_data(self, local: ClientData) -> ClientData:
        """Return the data from which an exchange draws its batches, by default the client's own.

        Args:
            local: The client's data.
        """
        return local

    def phases(self, exchange: str) -> Iterable[Phase]:
        """Return the phases of local training in an exchange, in order. Without a phase nothing is trained.

        The hook may be a generator. Code between two `yield`s runs between the two phases.

        Args:
            exchange: The name of the exchange.
        """
        return ONE_PHASE

    def fine_tuning(self, phase: Phase) -> Iterable[Phase]:
        """Return the phases of the fine-tuning before a test (`model.fine_tuning`), in order.

        The client trains by `local_loss`. What `receive` makes, such as round buffers, is not there.

        Args:
            phase: The phase that the settings ask for.
        """
        return (phase,)

    def local_loss(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of a batch, or what the wrapped module's `training_step` returns.

        Args:
            batch: The batch.
            batch_idx: The index of the batch in its epoch.
        """
        if self.module is not None:
            return self._loss_of(self.module, batch, batch_idx)
        x, y = batch
        loss = cross_entropy(self(x), y)
        self.log("train/ce", loss)
        return loss

    def _loss_of(self, module: LightningModule, batch: Batch, batch_idx: int) -> Tensor:
        """Call the wrapped module's `training_step`, and keep its outputs besides the loss.

        As in Lightning, a `training_step` that returns None skips the step.
        """
        output: Any
        own_step = vars(module).get("training_step")
        if own_step is not self._own_step or not self._num_arguments:
            self._own_step = own_step
            self._num_arguments = num_arguments(module.training_step)
        with self.forward_context():
            if self._num_arguments == 1:
                output = module.training_step(batch)
            else:
                output = module.training_step(batch, batch_idx)
        loss, self.outputs = check_returned(self, output)
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch: `local_loss` and the method's own terms.

        Args:
            batch: The batch.
            batch_idx: The index of the batch in its epoch.
        """
        return self.local_loss(batch, batch_idx)

    def accumulated_lr_slope(self, accumulated_lr: float) -> float:
        """Return the gradient of the method's loss on a scalar whose local loss has the gradient 1.

        FedProx returns 1 − μ·E.

        Args:
            accumulated_lr: How far the scalar has moved, E.
        """
        return 1.0

    def why_not_stacked(self) -> str | None:
        """Return why these settings are not stacked although the class is stackable, or None if they are."""
        return None

    def why_not_every_round(self) -> str | None:
        """Return why these settings cannot train clients whose data change in every round, or None if they can."""
        return None

    def nonfinite_hint(self) -> str:
        """Return advice for an update that is not finite, as the end of the error's sentence."""
        return "lower the learning rate, set model.clip_norm, or set model.faults.nonfinite to skip"

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        """Return the extras that go up besides the weights, after the training of an exchange.

        Args:
            exchange: The name of the exchange.
            local: The client's data.
        """
        return {}

    def answer(self, inquiry: Inquiry, broadcast: Broadcast, local: ClientData) -> dict[str, Any]:
        """Return the extras that go up in the exchange of a server module's inquiry. An attack answers otherwise.

        Args:
            inquiry: What answers.
            broadcast: The message of the server.
            local: The client's data.
        """
        return inquiry.answer(self, broadcast, local)

    def transmitted(self, update: ClientUpdate, broadcast: Broadcast, local: ClientData) -> ClientUpdate:
        """Return the update that leaves the client. An attack returns another one.

        Args:
            update: The update, as the client's transforms have made it.
            broadcast: The message of the server.
            local: The client's data.
        """
        return update

    def receive_deployment(self, extras: Mapping[str, Any], local: ClientData) -> None:
        """Prepare the model that the client deploys, if the server gives something for it (`ServerModule.deployment`).

        It is called before `deployed`. The client's entries and memory are loaded, and may be edited.

        Args:
            extras: What the server gives, by the names that the method gives it.
            local: The client's data.
        """

    def deployed(self) -> Callable[[Tensor], Tensor]:
        """Return the predictor `x -> logits` that this client would use after training.

        The client's entries and memory are loaded.
        """
        return self

    @property
    def deploys_own_model(self) -> bool:
        """Whether what a client deploys is another model than the evaluated one, apart from personal entries."""
        return type(self).deployed is not ClientModule.deployed

    # --- values and helpers for a method -----------------------------------------------------------------------

    @property
    def memory(self) -> dict[str, Any]:
        """The state of this client between rounds: tensors, numbers, strings, lists and dicts of them."""
        return self.context.memory

    @property
    def received(self) -> State:
        """The shared trainable weights at the start of the exchange, by name."""
        return self.context.received

    @property
    def round(self) -> dict[str, Any]:
        """The round buffers of this client, by name."""
        return self.context.round

    @property
    def num_steps(self) -> int:
        """K_i, the number of optimizer steps of this exchange so far."""
        return self.context.progress.num_steps

    @property
    def accumulated_lr(self) -> float:
        """E_i, how far the local optimizer would have moved a scalar whose gradient is always 1."""
        return self.context.progress.accumulated_lr

    @property
    def is_fedavg_equivalent(self) -> bool:
        """Whether all coefficients have the values at which the method is FedAvg.

        It is False for a subclass or an object that overrides what the method does to the loss.
        """
        if not self.may_be_fedavg_equivalent or sets_hooks(self):
            return False
        return all(getattr(self, name) == value for name, value in self.fedavg_equivalent.items())

    @property
    def present_needs(self) -> frozenset[str]:
        """The conditions of the method at its coefficients: `needs`, or none if they make it FedAvg."""
        return frozenset() if self.is_fedavg_equivalent else self.needs

    @property
    def adds_terms(self) -> bool:
        """Whether the class overrides `training_step`, and its coefficients do not make it FedAvg."""
        return self._has_own_step and not self.is_fedavg_equivalent

    def params(self) -> State:
        """Return the present shared trainable parameters, by the names that were fixed at setup."""
        return {name: value for name, value in self.trained().items() if name not in self._personal}

    def trained(self) -> State:
        """Return all present trainable parameters of the client by name, with the personal ones."""
        owners = self._parameter_owners or self.fix_trainable()
        if isinstance(self.net, HeterogeneousNets):
            client_id = self.context.client_id
            owners = [entry for entry in owners if self.has(client_id, name=entry[0])]
        return {name: getattr(owner, attribute) for name, owner, attribute in owners}

    def round_buffer(self, name: str, value: Tensor | State) -> None:
        """Keep a constant of this client for this round, on the module's device.

        Args:
            name: The name of the constant.
            value: A tensor, or several by name. Floating-point tensors get the type of the module's parameters, which
                is float32 at least.
        """
        like = next(self.parameters())
        if isinstance(value, Tensor):
            self.context.round[name] = placed_like(like, value)
        else:
            self.context.round[name] = {key: placed_like(like, entry) for key, entry in value.items()}

    def load_teacher(
        self,
        name: str,
        state: State | None = None,
        mode: Literal["eval", "train"] = "eval",
        *,
        common: bool = False,
    ) -> None:
        """Make a teacher, a frozen copy of the net.

        One copy serves all clients of a round that received the same weights.

        Args:
            name: The name of the teacher.
            state: The entries of the net by name. None means the weights as they were received.
            mode: The mode of BatchNorm. With "train" it uses batch statistics.
            common: Whether all clients that received the same weights have the same `state`, so that one copy serves
                them, too.

        Raises:
            ValueError: The client is built around a module.
        """
        if self.net is None:
            raise ValueError(f"{type(self).__name__}.load_teacher({name!r}) needs a client built with net=")
        if name not in self._teachers:
            self._teachers[name] = Teacher(name, self.net)
        teacher = self._teachers[name]
        context = self.context
        if isinstance(teacher.net, HeterogeneousNets):
            teacher.net.choose(context.client_id)
        token: object = None
        if state is None or common:
            token = context.weights_token
        if state is None:
            # The net itself may have moved since it received the weights.
            state = context.start
        if teacher.holds(token, mode):
            return
        entries = {entry_name.removeprefix("net."): value for entry_name, value in state.items()}
        teacher.load({**self.net.state_dict(), **entries}, token=token, mode=mode)
        if context.logit_cache is not None:
            context.logit_cache.stop(name)

    def teacher(self, name: str) -> Teacher:
        """Return a teacher that `receive` made. A call gives logits (B, C), and `features` gives features.

        Args:
            name: The name of the teacher.

        Raises:
            ValueError: `load_teacher` did not make the teacher.
        """
        if name not in self._teachers:
            raise ValueError(f"{type(self).__name__}.teacher({name!r}) needs load_teacher({name!r}) in receive")
        teacher = self._teachers[name]
        teacher.use(self.forward_context, self.context.logit_cache)
        return teacher

    @property
    def built_net(self) -> Backbone:
        """The net.

        Raises:
            RuntimeError: The net is not built yet, or the client is built around a module.
        """
        if self.net is None:
            raise RuntimeError(f"{type(self).__name__} has no net before it is built for the data, nor around a module")
        return self.net

    def features(self, x: Tensor) -> Tensor:
        """Return the net's features (B, D) of a batch, in the Trainer's precision.

        Args:
            x: The inputs (B, ...).
        """
        with self.forward_context():
            return self.built_net.features(x)

    # --- a method's own passes over data -----------------------------------------------------------------------

    def evaluation_mode(self) -> AbstractContextManager[None]:
        """Context in which the module is in eval mode and nothing is logged."""
        return evaluation_mode(self)

    def transferred(self, batch: Batch) -> Batch:
        """Put a batch on the device as for training: through the transfer hooks, in the Trainer's precision.

        Args:
            batch: The batch, on any device.

        Raises:
            ValueError: A `collate_fn` or a transfer hook has skipped the batch by None.
        """
        transferred = None if batch is None else self._transfer_of_run()(batch)
        if transferred is None:
            raise ValueError(
                "samples that are read at once must be a batch, got None; return a batch in collate_fn and transfer "
                "hooks (None skips a batch)"
            )
        return transferred

    def transfer_each(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Put batches on the device as `transferred` does. As in training, a batch of None is skipped.

        Args:
            batches: The batches, on any device.
        """
        return self._transfer_of_run().each(batches)

    def _transfer_of_run(self) -> BatchTransfer:
        """Return what transfers batches, which is made at its first use."""
        if self._transfer is None:
            self._transfer = BatchTransfer(self.lightning_modules(), device=next(self.parameters()).device)
        return self._transfer

    def over(
        self, local: ClientData, fn: Callable[[Batch], Any], split: str = "train", batch_size: int | None = None
    ) -> list[Any]:
        """Apply a function to every batch of a split, in order and without augmentation, in eval mode.

        Args:
            local: The client's data.
            fn: The function of a batch.
            split: The name of the split.
            batch_size: The number of samples in a batch. None: the batch size of training.

        Returns:
            The result for each batch.
        """
        with self.evaluation_mode():
            batches = local.batches(split, batch_size=batch_size)
            return [fn(batch) for batch in self.transfer_each(batches)]

    def rows_over(
        self, local: ClientData, fn: Callable[[Batch], Tensor], split: str = "train", batch_size: int | None = None
    ) -> Tensor:
        """Return a row for every sample of a split, in order and without augmentation, in eval mode: (n, ...).

        Args:
            local: The client's data.
            fn: Makes rows (B, ...) of a batch.
            split: The name of the split.
            batch_size: The number of samples in a batch. None: the batch size of training.

        Raises:
            ValueError: A sample has no row, because its batch was skipped.
        """
        parts = self.over(local, fn, split=split, batch_size=batch_size)
        return joined_rows(parts, num_samples=local.size(split), split=split, reader=type(self).__name__)

    @torch.no_grad()
    def features_over(self, local: ClientData, add: Callable[[Tensor, Tensor], Any], split: str = "train") -> None:
        """Give the net's features and the labels of every batch of a split to a function, as `over` does.

        Args:
            local: The client's data.
            add: Takes the features (B, D), in float32 or better, and the labels (B,) of a batch.
            split: The name of the split.
        """

        def add_batch(batch: Batch) -> None:
            x, y = batch
            add(to_float32(self.features(x)), y)

        self.over(local, add_batch, split=split)

    def loss_at(self, params: State, batch: Batch) -> Tensor:
        """Return `local_loss` of a batch at other values of some parameters. It is differentiable in them.

        It is computed in full precision, because torch.func has no rule for BatchNorm in mixed types. Metric objects
        count nothing.

        Args:
            params: The other values, by name.
            batch: The batch.
        """
        with self.in_full_precision(), silent_metrics(parts_that_count(self)):
            return cast(Tensor, as_function(self, "local_loss")(params, batch, 0))

    @contextmanager
    def in_full_precision(self) -> Iterator[None]:
        """Context without casts to the types of a mixed precision, for which torch.func lacks rules."""
        precision = self.forward_context
        self.forward_context = nullcontext
        try:
            with torch.autocast(self.device.type, enabled=False):
                yield
        finally:
            self.forward_context = precision

    # --- for the engine ----------------------------------------------------------------------------------------

    def begin(self, context: ClientContext) -> None:
        """Become the client of a context.

        Args:
            context: The state of the client.
        """
        self.context = context
        if isinstance(self.net, HeterogeneousNets):
            self.net.choose(context.client_id)

    def connect(self, forward_context: ForwardContext, transfer: BatchTransfer) -> None:
        """Use the Trainer's precision and the user's transfer hooks.

        Args:
            forward_context: The context of the precision.
            transfer: Puts batches on the device.
        """
        self.forward_context = forward_context
        self._transfer = transfer

    def disconnect(self) -> None:
        """Run in full precision again, as without a Trainer."""
        self.forward_context = nullcontext
        self._transfer = None

    def fix_trainable(self, personal: Iterable[str] = ()) -> list[tuple[str, nn.Module, str]]:
        """Fix which parameters are trainable, because none requires a gradient inside vmap.

        Args:
            personal: The names of the entries that are never sent.

        Returns:
            Of each trainable parameter the name, the module that has it, and its name there.
        """
        owners = []
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                path, _, attribute = name.rpartition(".")
                owners.append((name, self.get_submodule(path), attribute))
        self._parameter_owners = owners
        self._personal = frozenset(personal)
        return self._parameter_owners

    def has(self, client_id: int, name: str) -> bool:
        """Return True if an entry or a module belongs to a client, and not to another client's net.

        Args:
            client_id: The id of the client.
            name: The name of the entry or module.
        """
        net = self.net
        return not isinstance(net, HeterogeneousNets) or net.has(client_id, name.removeprefix("net."))

    @property
    def distils(self) -> bool:
        """Whether `load_teacher` was called."""
        return bool(self._teachers)

    def teaches_alike(self, token: object) -> bool:
        """Return True if every teacher has the same weights for all clients.

        Args:
            token: The object that identifies the weights that the clients received. None: they received different ones.
        """
        return all(token is not None and teacher.token is token for teacher in self._teachers.values())

    def lightning_modules(self) -> list[LightningModule]:
        """Return this module and the LightningModule that it wraps. The loop forwards hooks to them."""
        return [self] if self.module is None else [self, self.module]

    # --- Lightning ---------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Any:
        """The Trainer that the module is attached to."""
        return super().trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        LightningModule.trainer.__set__(self, trainer)  # type: ignore[attr-defined]
        if self.module is not None:
            # Lightning passes the Trainer only to modules of its own package, not to those of its twin.
            self.module.trainer = trainer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner: Any = self.built_net if self.module is None else self.module
        with self.forward_context():
            return inner(*args, **kwargs)

    def configure_callbacks(self) -> list[Callback]:
        """Add the callback that stands in for the federation under a plain Trainer."""
        return [StandaloneClient()] if self.trainer.lightning_module is self else []

    def configure_model(self) -> None:
        if self.module is not None:
            # Under a plain Trainer no loop has asked.
            check_method_around_module(self)
            self.module.configure_model()
        elif self.net is None:
            try:
                data = getattr(self.trainer, "datamodule", None)
            except RuntimeError:
                # The module is not attached to a Trainer.
                data = None
            self.build(
                num_classes=getattr(data, "num_classes", None),
                input_shape=getattr(data, "input_shape", None),
            )

    def configure_optimizers(self) -> Any:
        if self.module is not None:
            return self.module.configure_optimizers()
        optimizer: Any = self.optimizer_factory(self.parameters())
        if hasattr(optimizer, "attach_module"):
            # SAM must keep the statistics of BatchNorm in its second pass.
            optimizer.attach_module(self)
        return optimizer


def placed_like(like: Tensor, value: Tensor) -> Tensor:
    """Return a tensor on the device of another tensor, and in the type of that tensor.

    An integer tensor keeps its type. A half type of `like` counts as float32.

    Args:
        like: The other tensor.
        value: The tensor.
    """
    moved = copy_to_device(value, like.device)
    if not value.is_floating_point():
        return moved
    return moved.to(to_float32(like).dtype)
