"""The callbacks that a user's module makes for one evaluation of the module at a client."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from pytorch_lightning import Callback, LightningModule
from torchmetrics import Metric, MetricCollection

from fl_lightning.client.hooks import BATCH_HOOKS, EVALUATION_HOOKS, overridden, written_hooks
from fl_lightning.client.metric_states import counting_in, fresh_metrics
from fl_lightning.client.module import ClientModule
from fl_lightning.engines.clock import trainer_of
from fl_lightning.utils.settings import as_list

Stage = Literal["validate", "test"]
"""Lightning's word for an evaluation, as `setup` gets it."""

STAGES: Mapping[str, Stage] = {"validation": "validate", "test": "test"}
"""The stage of an evaluation, by the name of the step."""


class PassCallback:
    """Calls the hooks of one callback in an evaluation, as a Trainer does.

    Args:
        callback: The callback.
        module: The module that has made it.

    Attributes:
        hooks: Names of the hooks of evaluations that the author has written. Callbacks of Lightning's have none,
            because they see rounds only.
    """

    def __init__(self, callback: Callback, module: LightningModule) -> None:
        self.callback = callback
        self.hooks = frozenset(written_hooks(callback, (*BATCH_HOOKS, *EVALUATION_HOOKS)))
        self._module = module
        self._trainer = trainer_of(module)
        # A callback that the module keeps is the Trainer's, too, which has set it up.
        held_by_trainer: Sequence[Callback] = getattr(self._trainer, "callbacks", ())
        self._is_new = all(callback is not held for held in held_by_trainer)

    def call(self, name: str, *args: Any) -> None:
        """Call a hook if the author has written it.

        Args:
            name: The name of the hook.
            args: The arguments after the Trainer and the module.
        """
        if name in self.hooks:
            hook = getattr(self.callback, name)
            hook(self._trainer, self._module, *args)

    def set_up(self, stage: Stage) -> None:
        """Set the callback up, unless the Trainer has done so."""
        if self._is_new:
            self.callback.setup(self._trainer, self._module, stage=stage)

    def tear_down(self, stage: Stage) -> None:
        """Let the callback undo its `setup`."""
        if self._is_new:
            self.callback.teardown(self._trainer, self._module, stage=stage)

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Context in which the callback logs as its module does."""
        attributes = vars(self.callback)
        before: dict[str, Any] = {name: attributes[name] for name in ("log", "log_dict") if name in attributes}
        attributes["log"] = self._module.log
        attributes["log_dict"] = self._module.log_dict
        try:
            yield
        finally:
            del attributes["log"]
            del attributes["log_dict"]
            attributes.update(before)


class PassCallbacks:
    """Calls the hooks of all callbacks that the modules of a client have made for an evaluation.

    Args:
        callbacks: The callbacks, in order.
    """

    def __init__(self, callbacks: Sequence[PassCallback] = ()) -> None:
        self._callbacks = callbacks

    def call(self, name: str, *args: Any) -> None:
        """Call a hook of each callback.

        Args:
            name: The name of the hook.
            args: The arguments after the Trainer and the module.
        """
        for callback in self._callbacks:
            callback.call(name, *args)

    def parts_that_count(self) -> list[Metric | MetricCollection]:
        """List the metric objects that the callbacks keep."""
        if not self._callbacks:
            return []
        kept = [callback.callback for callback in self._callbacks]
        return list({id(part): part for part in counting_in("callbacks", kept).values()}.values())


def makers_of(modules: Iterable[LightningModule]) -> list[LightningModule]:
    """List the modules whose authors let them make callbacks."""
    makers: list[LightningModule] = []
    for module in modules:
        base = ClientModule if isinstance(module, ClientModule) else None
        if overridden(module, "configure_callbacks", base):
            makers.append(module)
    return makers


@contextmanager
def callbacks_of_pass(makers: Sequence[LightningModule], kind: str | None) -> Iterator[PassCallbacks]:
    """Context of one evaluation in which modules have made their callbacks anew, as for a Trainer's `validate`.

    What the callbacks of the Trainer count is therefore of its own passes.

    Args:
        makers: The modules that make callbacks. They log what counts for the client.
        kind: The step that evaluates the module. None evaluates nothing.
    """
    if not makers or kind is None:
        yield PassCallbacks()
        return
    made: list[PassCallback] = []
    for module in makers:
        made += [PassCallback(callback, module) for callback in as_list(module.configure_callbacks())]
    callbacks = [callback for callback in made if callback.hooks]
    stage = STAGES[kind]
    with ExitStack() as contexts:
        for callback in callbacks:
            contexts.enter_context(callback.logging())
        for callback in callbacks:
            callback.set_up(stage)
        all_callbacks = PassCallbacks(callbacks)
        contexts.enter_context(fresh_metrics(all_callbacks.parts_that_count()))
        yield all_callbacks
        for callback in callbacks:
            callback.tear_down(stage)
