"""What a client is: a LightningModule with a `training_step` of its own, and the hooks that a method may use."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, cast

from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning import Callback, LightningModule
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fl_lightning.aggregation import Aggregator
from fl_lightning.alone import Alone
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.modules import check_module, num_arguments
from fl_lightning.nets import Backbone, HeterogeneousNets, Perceptron
from fl_lightning.teacher import Repeats, Teacher
from fl_lightning.types import Batch, Broadcast, ClientData, Phase, State

NetFactory = Callable[[int, tuple[int, ...]], Backbone]
OptimizerFactory = Callable[[Iterable[Any]], Optimizer]
ONE_PHASE = (Phase(),)


@dataclass
class ClientContext:
    """What belongs to the one client that is being trained; the loop swaps it between clients."""

    client_id: int = -1
    received: State = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    round: dict[str, Any] = field(default_factory=dict)
    num_steps: int = 0
    exposure: float = 0.0
    weights_key: tuple[Any, ...] = ()
    repeats: Repeats | None = None


class ClientModule(LightningModule):
    """A client of the federation; as it stands, FedAvg's.

    Built around a net (a classifier trained with cross-entropy) or around any LightningModule, whose own
    `training_step` is then the local loss and whose `configure_optimizers` gives the local optimizer.

    Args:
        net: factory `(num_classes, input_shape) -> net`; None: a small perceptron.
        module: a LightningModule to train in place of a net.
        optimizer: factory of the local optimizer, for a net; None: SGD(lr=0.01, momentum=0.9). It is built anew for
            every client and round.
        num_classes: classes C; None: taken from the data.
        input_shape: shape of one sample; None: taken from the data.

    Raises:
        ValueError: if `module` is given together with `net` or `optimizer`.
        TypeError: if `module` is no `pytorch_lightning.LightningModule` or has no `training_step`.
    """

    aggregator_class: ClassVar[type[Aggregator]] = Aggregator
    exchanges: ClassVar[tuple[str, ...]] = ("train",)
    needs: ClassVar[frozenset[str]] = frozenset()
    stackable: ClassVar[bool] = True

    def __init__(
        self,
        net: Callable[[int, tuple[int, ...]], Backbone] | None = None,
        module: LightningModule | None = None,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        num_classes: int | None = None,
        input_shape: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if module is not None:
            for other, value in (("net", net), ("optimizer", optimizer)):
                if value is not None:
                    raise ValueError(
                        f"{name} takes either module= or {other}=, got both; a module brings its own net and "
                        f"configure_optimizers"
                    )
            check_module(module)
            if "logits" in self.needs:
                raise ValueError(
                    f"{name} needs the logits of a net, got module={type(module).__name__}; give it net= "
                    f"(a factory of a classifier) instead"
                )
        self.module = module
        self.net: Backbone | None = None
        self.net_factory: NetFactory = net or Perceptron
        self.optimizer_factory: OptimizerFactory = optimizer or partial(SGD, lr=0.01, momentum=0.9)
        self.num_classes, self.input_shape = num_classes, input_shape and tuple(input_shape)
        self.forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.context = ClientContext()
        self.outputs: dict[str, Any] = {}
        """What the wrapped module's last `training_step` returned besides the loss."""
        self._teachers: dict[str, Teacher] = {}
        self._owners: list[tuple[str, nn.Module, str]] = []
        if module is not None:
            self.automatic_optimization = module.automatic_optimization
            if not module.automatic_optimization and type(self).training_step is not ClientModule.training_step:
                raise ValueError(
                    f"{name} adds terms to the loss, but {type(module).__name__} steps its optimizers itself "
                    f"(automatic_optimization=False); return the loss from training_step instead, or use FedAvg"
                )
            self._arguments = min(2, num_arguments(module.training_step))
        elif num_classes is not None and input_shape is not None:
            self.build(num_classes, tuple(input_shape))

    def build(self, num_classes: int | None, input_shape: tuple[int, ...] | None) -> None:
        """Build the net once the data are known (idempotent).

        Raises:
            ValueError: if a value given to the constructor is not that of the data, or is known to neither.
        """
        if self.module is not None:
            return
        for name, own, found in (
            ("num_classes", self.num_classes, num_classes),
            ("input_shape", self.input_shape, input_shape),
        ):
            if own is not None and found is not None and own != found:
                raise ValueError(
                    f"{name} of the client must be that of the data ({found}), got {own}; leave it unset to take it "
                    f"from the data"
                )
            if own is None and found is None:
                raise ValueError(
                    f"{type(self).__name__} with net= needs {name}, which the data do not know; give {name} to the "
                    f"client or to the data module, or use module="
                )
            setattr(self, name, found if own is None else own)
        if self.net is None:
            assert self.num_classes is not None
            assert self.input_shape is not None
            self.net = self.net_factory(self.num_classes, self.input_shape)

    # --- what a method overrides -------------------------------------------------------------------------------

    def is_personal(self, name: str, owner: nn.Module) -> bool:
        """True for an entry of the state dict that never travels; `owner` is the module that holds it."""
        return False

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        """Called once per exchange with the broadcast, its weights loaded: make teachers, masks, round buffers."""

    def phases(self, exchange: str) -> Iterable[Phase]:
        """The stretches of local training of an exchange, in order; none: nothing is trained."""
        return ONE_PHASE

    def local_loss(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean cross-entropy of the batch, or the wrapped module's own `training_step`."""
        if self.module is None:
            x, y = batch
            loss = cross_entropy(self(x), y)
            self.log("train/ce", loss)
            return loss
        with self.forward_context():
            output: Any = self.module.training_step(*(batch, batch_idx)[: self._arguments])
        more = isinstance(output, Mapping)
        result = output.get("loss") if more else output
        if more and result is None and self.automatic_optimization:
            raise ValueError(
                f"{type(self.module).__name__}.training_step must return its loss under 'loss', got the keys "
                f"{sorted(output)}"
            )
        self.__dict__["outputs"] = {name: value for name, value in output.items() if name != "loss"} if more else {}
        if result is None and type(self).training_step is not ClientModule.training_step:
            raise ValueError(
                f"{type(self).__name__} adds terms to the loss of {type(self.module).__name__}.training_step, which "
                f"returned None; return a loss for every batch"
            )
        return cast(Tensor, result)  # None skips the step, as in Lightning

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.local_loss(batch, batch_idx)

    def exposure_slope(self, exposure: float) -> float:
        """Gradient of the method's own terms on a scalar that has moved by `exposure` (FedProx: 1 − μ·exposure)."""
        return 1.0

    def remedy(self) -> str:
        """What to do about an update that is not finite; ends the error's sentence."""
        return "lower the learning rate, set model.clip_norm, or set model.nonfinite to skip"

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        """What goes up besides the weights, after the exchange's training."""
        return {}

    def deployed(self) -> Callable[[Tensor], Tensor]:
        """What this client would use after training; called with its entries and memory loaded."""
        return self

    # --- helpers -----------------------------------------------------------------------------------------------

    @property
    def memory(self) -> dict[str, Any]:
        """What this client keeps between rounds: tensors, numbers, strings, lists and dicts of them."""
        return self.context.memory

    @property
    def received(self) -> State:
        """The trainable weights as they came at the start of the exchange, by name."""
        return self.context.received

    @property
    def round(self) -> dict[str, Any]:
        """This round's buffers of the current client, by name."""
        return self.context.round

    @property
    def num_steps(self) -> int:
        """K_i: optimizer steps of this exchange so far."""
        return self.context.num_steps

    @property
    def exposure(self) -> float:
        """E_i: how far the local optimizer would have moved a scalar whose gradient is always 1."""
        return self.context.exposure

    def switch(self, context: ClientContext) -> None:
        """Make this module stand for another client (not through `nn.Module.__setattr__`, which costs 5 µs)."""
        self.__dict__["context"] = context
        if isinstance(self.net, HeterogeneousNets):
            self.net.choose(context.client_id)

    def has(self, client_id: int, name: str) -> bool:
        """Whether the entry (or module) `name` is this client's: not one of another client's net."""
        net = self.net
        return not isinstance(net, HeterogeneousNets) or net.has(client_id, name.removeprefix("net."))

    def params(self) -> State:
        """The trainable parameters as they are now, by the names fixed at setup."""
        if not self._owners:
            self.fix_trainable()
        owners = self._owners
        if isinstance(self.net, HeterogeneousNets):
            owners = [entry for entry in owners if self.has(self.context.client_id, entry[0])]
        return {name: getattr(owner, attribute) for name, owner, attribute in owners}

    def fix_trainable(self) -> tuple[str, ...]:
        """Fix which parameters are trainable, once the net exists (inside vmap none requires a gradient)."""
        modules = dict(self.named_modules())
        self._owners = []
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                path, _, attribute = name.rpartition(".")
                self._owners.append((name, modules[path], attribute))
        return tuple(name for name, *_ in self._owners)

    def round_buffer(self, name: str, value: Tensor | State) -> None:
        """Keep a per-client constant for this round; read it back as `self.round[name]`."""
        self.context.round[name] = value

    def frozen(self, name: str, mode: Literal["eval", "train"] = "eval") -> Teacher:
        """The teacher `name`: made of the received net in `receive`, returned as it is in `training_step`.

        One copy serves all clients of a round that received the same weights.
        """
        teacher = self._teachers.get(name)
        if teacher is None:
            if self.net is None:
                raise ValueError(f"{type(self).__name__}.frozen({name!r}) needs a client built with net=")
            teacher = self._teachers[name] = Teacher(name, self.net, self._enter)
        if not self.context.num_steps:
            teacher.load(self.net, self.context.weights_key, mode)  # type: ignore[arg-type]
        teacher.repeats = self.context.repeats
        return teacher

    @property
    def distils(self) -> bool:
        """True once there is a teacher."""
        return bool(self._teachers)

    def placed(self, batch: Batch) -> Batch:
        """`batch` on the device of the parameters and in their type, for a method's own passes over data."""
        like = next(self.parameters())

        def place(x: Tensor) -> Tensor:
            return x.to(like.device, like.dtype if x.is_floating_point() else x.dtype)

        return apply_to_collection(batch, Tensor, place)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Eval mode, full precision, and nothing is logged: for a method's own passes over data."""
        modes = [(module, module.training) for module in self.modules()]
        modules, names = list(self.lightning_modules()), ("log", "log_dict")
        lent = [{name: module.__dict__[name] for name in names if name in module.__dict__} for module in modules]
        precision, self.forward_context = self.forward_context, nullcontext
        self.eval()
        try:
            for module in modules:
                module.__dict__.update(dict.fromkeys(names, _ignore))
            yield
        finally:
            for module, services in zip(modules, lent, strict=True):
                for name in names:
                    del module.__dict__[name]
                module.__dict__.update(services)
            self.forward_context = precision
            for part, mode in modes:
                part.training = mode

    def _enter(self) -> AbstractContextManager[Any]:
        return self.forward_context()

    # --- Lightning ---------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner = self.net if self.module is None else self.module
        assert inner is not None
        with self.forward_context():
            return inner(*args, **kwargs)

    def configure_callbacks(self) -> list[Callback]:
        """Under a plain Trainer, what stands in for the federation."""
        return [Alone()] if self.trainer.lightning_module is self else []

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
        optimizer = self.optimizer_factory(self.parameters())
        if getattr(optimizer, "module", self) is None:  # SAM: leaves BatchNorm's statistics alone in its second pass
            optimizer.module = self  # type: ignore[attr-defined]
        return optimizer

    def lightning_modules(self) -> Iterator[LightningModule]:
        """This module and the LightningModule it wraps, whose hooks the loop forwards."""
        yield self
        if self.module is not None:
            yield self.module


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Stands for `log` where nothing is logged."""
