"""Base class of clients: a LightningModule, the hooks that a method overrides, and helpers for methods."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from pytorch_lightning import Callback, LightningModule
from torch import Tensor, nn
from torch.optim import SGD

from fl_lightning.aggregation import ServerModule
from fl_lightning.client.checkpoint_io import CheckedLoading
from fl_lightning.client.checks import (
    can_be_fedavg_equivalent,
    check_client_arguments,
    check_returned,
    made_net,
    num_arguments,
    same_or_unset,
    uncompiled,
)
from fl_lightning.client.context import ClientContext
from fl_lightning.client.modes import evaluation_mode
from fl_lightning.client.services import BatchTransfer
from fl_lightning.client.standalone import StandaloneClient
from fl_lightning.client.teacher import Teacher
from fl_lightning.functional.importance import as_function
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.functional.state import to_float32
from fl_lightning.nets import Backbone, HeterogeneousNets, Perceptron
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
from fl_lightning.utils.devices import to_device
from fl_lightning.utils.signatures import check_overrides, checks_arguments, document_arguments_of

ONE_PHASE = (Phase(),)


class ClientModule(CheckedLoading):
    """A client of the federation.

    As it stands, FedAvg's.

    Built around a net (a classifier trained with cross-entropy) or around any LightningModule, whose own
    `training_step` is then the local loss and whose `configure_optimizers` gives the local optimizer.

    Args:
        net: factory `(num_classes, input_shape) -> net`; None: a small perceptron.
        module: a LightningModule to train in place of a net.
        optimizer: factory of the local optimizer, for a net; None: SGD(lr=0.01, momentum=0.9). It is built anew for
            every client and round.
        num_classes: classes C; None: taken from the data.
        input_shape: shape of one sample; None: taken from the data.

    Attributes:
        server_class: the method's server side.
        exchanges: names of a round's exchanges, in order.
        needs: names of splits, `logits` (a net, not a module), `accumulated_lr` (E_i is defined: SGD) or `clients`
            (several, not one that has all samples); checked at start.
        own_start: whether training starts from the client's own model, not from the weights that it received.
        stackable: whether an engine may train several clients at once; counts only in the class that sets it.
        sends: kinds of what goes up to the server.
        changes: names of extras that are changes of a state over the trained entries: a codec with feedback codes them.
        reads: kinds of what is read of the client's training data besides the batches of its training steps.
        is_private: whether what leaves a client hides its samples.
        sends_counts: whether its numbers of samples and steps go up.
        fedavg_equivalent: coefficients by name at which the method is FedAvg, bit for bit: then only `local_loss` is
            called.

    Raises:
        ValueError: if `module` is given together with `net` or `optimizer`.
        TypeError: if `module` is no LightningModule or has no `training_step`.
    """

    server_class: ClassVar[type[ServerModule]] = ServerModule
    exchanges: ClassVar[tuple[str, ...]] = ("train",)
    needs: ClassVar[frozenset[str]] = frozenset()
    own_start: ClassVar[bool] = False
    stackable: ClassVar[bool] = False
    sends: frozenset[Sent] = frozenset({"weights"})
    changes: ClassVar[frozenset[str]] = frozenset()
    reads: frozenset[Read] = frozenset()
    is_private: bool = False
    sends_counts: bool = True
    fedavg_equivalent: ClassVar[Mapping[str, float]] = {}

    @checks_arguments
    def __init__(
        self,
        net: Callable[[int, tuple[int, ...]], Backbone] | None = None,
        module: LightningModule | TrainableModule | None = None,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
        num_classes: int | None = None,
        input_shape: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self.may_be_fedavg_equivalent = can_be_fedavg_equivalent(self)
        self.adds_terms = type(self).training_step is not ClientModule.training_step
        self.module = cast(LightningModule | None, uncompiled(module))
        check_client_arguments(self, self.module, num_classes, input_shape, net=net, optimizer=optimizer)
        self.net: Backbone | None = None
        self.net_factory: Callable[[int, tuple[int, ...]], Backbone] = net or Perceptron
        self.optimizer_factory: OptimizerFactory = optimizer or partial(SGD, lr=0.01, momentum=0.9)
        self.num_classes = num_classes
        self.input_shape = input_shape and tuple(input_shape)
        self.context = ClientContext()
        self.forward_context: ForwardContext = nullcontext
        self.outputs: dict[str, Any] = {}
        """Further outputs of the wrapped module's last `training_step`, besides the loss."""
        self._transfer: Callable[[Batch], Batch] | None = None
        self._teachers: dict[str, Teacher] = {}
        self._parameter_owners: list[tuple[str, nn.Module, str]] = []
        self._personal: frozenset[str] = frozenset()
        self._num_arguments = 2 if self.module is None else num_arguments(self.module.training_step)
        if self.module is not None:
            self.automatic_optimization = self.module.automatic_optimization
        elif num_classes is not None and input_shape is not None:
            self.build(self.num_classes, self.input_shape)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_overrides(cls)
        document_arguments_of(cls, ClientModule)

    def build(self, num_classes: int | None, input_shape: tuple[int, ...] | None) -> None:
        """Build the net once the data are known (idempotent).

        Raises:
            ValueError: if a value given to the constructor is not that of the data, or is known to neither.
        """
        if self.module is not None:
            return
        self.num_classes = same_or_unset(self, "num_classes", self.num_classes, num_classes)
        self.input_shape = same_or_unset(self, "input_shape", self.input_shape, input_shape)
        if self.net is None:
            self.net = made_net(self.net_factory, self.num_classes, self.input_shape)

    # --- hooks of a method -------------------------------------------------------------------------------------

    def is_personal(self, name: str, owner: nn.Module) -> bool:
        """Return True for an entry of the state dict that is never transmitted.

        `owner` is the module that holds it.
        """
        return False

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        """Prepare for an exchange, once its weights are loaded: make teachers, masks, round buffers.

        May make own passes over the local data (`over`) and move the starting point (edit the module's weights).
        """

    def training_data(self, local: ClientData) -> ClientData:
        """Give the data that an exchange's batches are drawn from, the client's own by default."""
        return local

    def phases(self, exchange: str) -> Iterable[Phase]:
        """The segments of local training of an exchange, in order.

        None: nothing is trained.

        May be a generator: code between two `yield`s runs between the two segments.
        """
        return ONE_PHASE

    def local_loss(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean cross-entropy of the batch, or the wrapped module's own `training_step`."""
        if self.module is not None:
            return self._loss_of(self.module, batch, batch_idx)
        x, y = batch
        loss = cross_entropy(self(x), y)
        self.log("train/ce", loss)
        return loss

    def _loss_of(self, module: LightningModule, batch: Batch, batch_idx: int) -> Tensor:
        """Call the wrapped module's `training_step`, and keep what it returns besides the loss.

        None skips the step, as in Lightning.
        """
        with self.forward_context():
            output: Any = module.training_step(*(batch, batch_idx)[: self._num_arguments])
        loss, self.outputs = check_returned(self, output)
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch: `local_loss` and the method's own terms."""
        return self.local_loss(batch, batch_idx)

    def accumulated_lr_slope(self, accumulated_lr: float) -> float:
        """Give the gradient of the method's terms on a scalar that has moved by `accumulated_lr` (FedProx: 1 − μ·E)."""
        return 1.0

    def why_not_stacked(self) -> str | None:
        """Explain why these settings are not stacked although the class is stackable.

        None: they are.
        """
        return None

    def nonfinite_hint(self) -> str:
        """Advice for an update that is not finite.

        Ends the error's sentence.
        """
        return "lower the learning rate, set model.clip_norm, or set model.faults.nonfinite to skip"

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        """Make the extras that go up besides the weights, after the exchange's training."""
        return {}

    def transmitted(self, update: ClientUpdate, broadcast: Broadcast, local: ClientData) -> ClientUpdate:
        """Replace what leaves the client, once its transforms have made it: an attack's place."""
        return update

    def deployed(self) -> Callable[[Tensor], Tensor]:
        """Predictor `x -> logits` that this client would use after training.

        Its entries and memory are loaded.
        """
        return self

    # --- values and helpers for a method -----------------------------------------------------------------------

    @property
    def memory(self) -> dict[str, Any]:
        """State of this client between rounds: tensors, numbers, strings, lists and dicts of them."""
        return self.context.memory

    @property
    def received(self) -> State:
        """The shared trainable weights as they came at the start of the exchange, by name."""
        return self.context.received

    @property
    def round(self) -> dict[str, Any]:
        """This round's buffers of the current client, by name."""
        return self.context.round

    @property
    def num_steps(self) -> int:
        """K_i: optimizer steps of this exchange so far."""
        return self.context.progress.num_steps

    @property
    def accumulated_lr(self) -> float:
        """E_i: how far the local optimizer would have moved a scalar whose gradient is always 1."""
        return self.context.progress.accumulated_lr

    @property
    def is_fedavg_equivalent(self) -> bool:
        """True where all coefficients have the values at which the method is FedAvg.

        Never for a subclass that overrides what the method itself does to the loss.
        """
        return self.may_be_fedavg_equivalent and all(getattr(self, n) == v for n, v in self.fedavg_equivalent.items())

    def params(self) -> State:
        """The shared trainable parameters as they are now, by the names fixed at setup."""
        return {name: value for name, value in self.trained().items() if name not in self._personal}

    def trained(self) -> State:
        """All trainable parameters of the current client, the personal ones too."""
        owners = self._parameter_owners or self.fix_trainable()
        if isinstance(self.net, HeterogeneousNets):
            owners = [entry for entry in owners if self.has(self.context.client_id, entry[0])]
        return {name: getattr(owner, attribute) for name, owner, attribute in owners}

    def round_buffer(self, name: str, value: Tensor | State) -> None:
        """Keep a constant of this client for this round, on the module's device, floats in the module's type."""
        like = next(self.parameters())

        def placed(x: Tensor) -> Tensor:
            there = to_device(x, like.device)
            return there.to(to_float32(like).dtype) if x.is_floating_point() else there

        kept = placed(value) if isinstance(value, Tensor) else {n: placed(x) for n, x in value.items()}
        self.context.round[name] = kept

    def load_teacher(self, name: str, state: State | None = None, mode: Literal["eval", "train"] = "eval") -> None:
        """Make the teacher `name`: a frozen copy of the net with the weights as they came, or with `state`.

        One copy serves all clients of a round that received the same weights. With `mode="train"` its BatchNorm uses
        batch statistics.
        """
        if self.net is None:
            raise ValueError(f"{type(self).__name__}.load_teacher({name!r}) needs a client built with net=")
        if name not in self._teachers:
            self._teachers[name] = Teacher(name, self.net)
        teacher = self._teachers[name]
        context = self.context
        if isinstance(teacher.net, HeterogeneousNets):
            teacher.net.choose(context.client_id)
        # as they came: the net itself may have moved since
        given, token = (context.start, context.weights_token) if state is None else (state, None)
        if teacher.holds(token, mode):
            return
        entries = {n.removeprefix("net."): value for n, value in given.items()}
        teacher.load({**self.net.state_dict(), **entries}, token, mode)
        if context.logit_cache is not None:
            context.logit_cache.stop(name)

    def teacher(self, name: str) -> Teacher:
        """The teacher `name` that `receive` made: callable for logits (B, C), `features` for features."""
        if name not in self._teachers:
            raise ValueError(f"{type(self).__name__}.teacher({name!r}) needs load_teacher({name!r}) in receive")
        teacher = self._teachers[name]
        teacher.use(self.forward_context, self.context.logit_cache)
        return teacher

    @property
    def built_net(self) -> Backbone:
        """The net.

        Raises:
            RuntimeError: it is not built yet, or there is a module in its place.
        """
        if self.net is None:
            raise RuntimeError(f"{type(self).__name__} has no net before it is built for the data, nor around a module")
        return self.net

    def features(self, x: Tensor) -> Tensor:
        """Compute the net's features of a batch, (B, D), in the Trainer's precision."""
        with self.forward_context():
            return self.built_net.features(x)

    # --- a method's own passes over data -----------------------------------------------------------------------

    def evaluation_mode(self) -> AbstractContextManager[None]:
        """Context in which the module is in eval mode and nothing is logged."""
        return evaluation_mode(self)

    def transferred(self, batch: Batch) -> Batch:
        """Put a batch where training has it: through the transfer hooks, on the device, in the Trainer's precision."""
        if self._transfer is None:
            self._transfer = BatchTransfer(self.lightning_modules(), device=next(self.parameters()).device)
        return self._transfer(batch)

    def over(
        self, local: ClientData, fn: Callable[[Batch], Any], split: str = "train", batch_size: int | None = None
    ) -> list[Any]:
        """Apply `fn` to every batch of a split, in order and without augmentation, in eval mode."""
        with self.evaluation_mode():
            return [fn(self.transferred(batch)) for batch in local.batches(split, batch_size=batch_size)]

    def loss_at(self, params: State, batch: Batch) -> Tensor:
        """Compute `local_loss` of a batch at other values of some parameters, by name.

        Differentiable in them.

        In full precision: torch.func has no rule for BatchNorm in mixed types.
        """
        with self.in_full_precision():
            return cast(Tensor, as_function(self, "local_loss")(params, batch, 0))

    @contextmanager
    def in_full_precision(self) -> Iterator[None]:
        """Context in which nothing is cast to the types of a mixed precision, for which torch.func lacks rules."""
        precision = self.forward_context
        self.forward_context = nullcontext
        try:
            with torch.autocast(self.device.type, enabled=False):
                yield
        finally:
            self.forward_context = precision

    # --- for the engine ----------------------------------------------------------------------------------------

    def begin(self, context: ClientContext) -> None:
        """Become the client of `context`."""
        self.context = context
        if isinstance(self.net, HeterogeneousNets):
            self.net.choose(context.client_id)

    def connect(self, forward_context: ForwardContext, transfer: Callable[[Batch], Batch]) -> None:
        """Use the Trainer's precision and the user's transfer hooks."""
        self.forward_context = forward_context
        self._transfer = transfer

    def disconnect(self) -> None:
        """Run in full precision again, as without a Trainer."""
        self.forward_context = nullcontext
        self._transfer = None

    def fix_trainable(self, personal: Iterable[str] = ()) -> list[tuple[str, nn.Module, str]]:
        """Fix which parameters are trainable (inside vmap none requires a gradient), and which are never sent."""
        names = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        places = [(name, *name.rpartition(".")[::2]) for name in names]
        self._parameter_owners = [(name, self.get_submodule(path), attribute) for name, path, attribute in places]
        self._personal = frozenset(personal)
        return self._parameter_owners

    def has(self, client_id: int, name: str) -> bool:
        """Return True where the entry (or module) `name` belongs to this client, not to another client's net."""
        net = self.net
        return not isinstance(net, HeterogeneousNets) or net.has(client_id, name.removeprefix("net."))

    @property
    def distils(self) -> bool:
        """True once `load_teacher` was called."""
        return bool(self._teachers)

    def teaches_alike(self, token: object) -> bool:
        """Return True where every teacher has the weights that `token` stands for.

        None: of no common ones.
        """
        return all(token is not None and teacher.token is token for teacher in self._teachers.values())

    def lightning_modules(self) -> list[LightningModule]:
        """This module and the LightningModule it wraps, whose hooks the loop forwards."""
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
            self.module.trainer = trainer  # Lightning hands it on to modules of its own package only

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner: Any = self.built_net if self.module is None else self.module
        with self.forward_context():
            return inner(*args, **kwargs)

    def configure_callbacks(self) -> list[Callback]:
        """Add the callback that stands in for the federation under a plain Trainer."""
        return [StandaloneClient()] if self.trainer.lightning_module is self else []

    def configure_model(self) -> None:
        if self.module is not None:
            self.module.configure_model()
        elif self.net is None:
            try:
                data = getattr(self.trainer, "datamodule", None)
            except RuntimeError:  # not attached to a Trainer
                data = None
            self.build(getattr(data, "num_classes", None), getattr(data, "input_shape", None))

    def configure_optimizers(self) -> Any:
        if self.module is not None:
            return self.module.configure_optimizers()
        optimizer: Any = self.optimizer_factory(self.parameters())
        if hasattr(optimizer, "attach_module"):  # SAM keeps BatchNorm's statistics in its second pass
            optimizer.attach_module(self)
        return optimizer
