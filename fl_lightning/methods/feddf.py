"""FedDF: the server distils the clients' mean prediction on unlabelled data into the mean of their weights.

Source: Lin et al., NeurIPS 2020, arXiv:2006.07242, Algorithm 1; Adam with a cosine schedule as in its experiments.
Clients and rule: any that share all their weights; set as `model.server_module`. The unlabelled data are the server's
proxy split, whose labels are not read.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import functional_call

from fl_lightning.aggregation import ServerModule
from fl_lightning.client import ClientModule
from fl_lightning.functional.losses import kl_divergence
from fl_lightning.functional.state import to_float32
from fl_lightning.types import ClientUpdate, State
from fl_lightning.utils.batches import joined_rows
from fl_lightning.utils.devices import copy_to_device
from fl_lightning.utils.life import heartbeat
from fl_lightning.utils.settings import check_above, check_at_least, check_choice

ROWS_AT_ONCE = 1000
"""Number of samples in a forward pass that trains nothing."""


class FedDFServer(ServerModule):
    """Minimizes T² KL(softmax(mean_i z_i / T) ‖ softmax(z / T)) over the student's trainable weights, from the mean.

    The teachers are the clients with data, with equal weight. Teachers and student are in eval mode throughout. Each
    teacher has its own running statistics, and the student keeps the mean of them.

    Args:
        temperature: Softmax temperature T > 0.
        distill_lr: Learning rate of Adam, which is built anew in every round, > 0.
        distill_schedule: Schedule of the learning rate: `cosine`, to 0 at the last step, or `constant`.
        distill_batch: Number of proxy samples in a step, ≥ 1. `full` takes all.
        distill_steps: Largest number of steps in a round. 0 is the rule's aggregate alone.
        patience: Number of steps without a gain in accuracy on the server's validation split (`data.val_fraction`)
            after which the distillation of a round stops. Without such a split all steps are taken.
        eval_every: Number of steps from one evaluation on the validation split to the next.
    """

    needs = frozenset({"logits", "proxy"})
    stale_reason = "takes the clients' models as teachers, which would be no longer theirs"

    def __init__(  # noqa: PLR0917 - called by position
        self,
        temperature: float = 1.0,
        distill_lr: float = 1e-3,
        distill_schedule: Literal["cosine", "constant"] = "cosine",
        distill_batch: int | Literal["full"] = 128,
        distill_steps: int = 10_000,
        patience: int = 1000,
        eval_every: int = 100,
    ) -> None:
        super().__init__()
        check_above(0, temperature=temperature, distill_lr=distill_lr)
        check_choice(("cosine", "constant"), distill_schedule=distill_schedule)
        check_at_least(0, "0 distils nothing", distill_steps=distill_steps)
        check_at_least(1, patience=patience, eval_every=eval_every)
        if distill_batch != "full":
            check_at_least(1, "'full' is the whole split", distill_batch=distill_batch)
        self.temperature = temperature
        self.distill_lr = distill_lr
        self.distill_schedule = distill_schedule
        self.distill_batch = distill_batch
        self.distill_steps = distill_steps
        self.patience = patience
        self.eval_every = eval_every
        self.steps_taken = 0
        """Number of steps of the last distillation."""

    @property
    def client(self) -> ClientModule:
        """The client whose net is used. Its own weights stay as they are."""
        return self.client_of(ClientModule)

    @property
    def validation(self) -> Any:
        """The server's validation split. None: there is none."""
        try:
            return self.server.data("val")
        except ValueError:
            return None

    def setup(self) -> None:
        saved = self.client.state_dict()
        named = [*self.client.named_parameters(), *self.client.named_buffers()]
        kept = [name for name, _ in named if name in saved and name not in self.server.weights]
        if kept:
            raise ValueError(
                f"FedDF distils into a whole net, but {kept[0]!r} stays with each client; leave model.personal unset"
            )

    def add(self, update: ClientUpdate) -> None:
        if update.weights is not None:
            self.gather(replace(update, extras={}))

    def finish(self, exchange: str, aggregate: State | None) -> State | None:
        teachers = [row.weights for row in self.rows_with("num_samples").values() if row.weights]
        if aggregate is None or not teachers or not self.distill_steps:
            return aggregate
        with self.client.evaluation_mode():
            return self.distilled(aggregate, self.ensemble(teachers))

    def ensemble(self, teachers: Sequence[State]) -> Tensor:
        """Compute the mean logits of the teachers on the proxy split, (n, C)."""
        proxy = self.server.data("proxy")
        by_teacher: list[Tensor] = []
        for teacher in teachers:
            parts = [logits for logits, _ in self.answers(teacher, proxy)]
            by_teacher.append(joined_rows(parts, num_samples=len(proxy), split="proxy", reader="FedDF"))
        first, *others = by_teacher
        return sum(others, first) / len(teachers)

    def distilled(self, student: State, target: Tensor) -> State:
        """Distill into the student, and return its weights.

        Args:
            student: The weights at the start, by name.
            target: The teachers' mean logits on the proxy split, (n, C).
        """
        trained = {name: student[name].detach().clone().requires_grad_() for name in self.server.trainable}
        student = {**student, **trained}
        proxy = self.server.data("proxy")
        optimizer = torch.optim.Adam(trained.values(), lr=self.distill_lr)
        best = self.accuracy(student)
        gained = 0
        order = self.order(len(proxy))
        for step in range(self.distill_steps):
            heartbeat()
            optimizer.param_groups[0]["lr"] = self.lr_at(step)
            rows = next(order)
            (batch,) = proxy.batches([rows], None)
            x, _ = self.client.transferred(batch)
            taught = target[copy_to_device(rows, target.device)]
            with torch.enable_grad():
                logits = self.predict(student, x)
                loss = kl_divergence(logits, taught, temperature=self.temperature)
                gradients = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
            for parameter, gradient in zip(trained.values(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            self.steps_taken = step + 1
            if self.validation is not None and self.steps_taken % self.eval_every == 0:
                accuracy = self.accuracy(student)
                if accuracy > best:
                    best = accuracy
                    gained = self.steps_taken
                elif self.steps_taken - gained >= self.patience:
                    break
        return {name: value.detach() for name, value in student.items()}

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if self.distill_schedule == "constant":
            return self.distill_lr
        return self.distill_lr * (1 + math.cos(math.pi * step / self.distill_steps)) / 2

    def order(self, n: int) -> Iterator[Tensor]:
        """Draw the proxy samples of each step, (B,) int64, pass after pass in a new order.

        Args:
            n: Number of proxy samples.
        """
        generator = self.server.generator("distillation")
        size = n if self.distill_batch == "full" else self.distill_batch
        while True:
            yield from torch.split(torch.randperm(n, generator=generator), size)

    def predict(self, state: State, x: Tensor) -> Tensor:
        """Compute the logits of the net with other weights: (B, ...) -> (B, C), float32 or better."""
        entries = {name.removeprefix("net."): value for name, value in state.items()}
        with self.client.forward_context():
            return to_float32(functional_call(self.client.built_net, entries, (x,)))

    @torch.no_grad()
    def answers(self, state: State, split: Any) -> list[tuple[Tensor, Tensor]]:
        """Return the logits (B, C) and the labels (B,) of each batch of a split."""
        rows = torch.split(torch.arange(len(split)), ROWS_AT_ONCE)
        batches = self.client.transfer_each(split.batches(rows, None))
        return [(self.predict(state, x), y) for x, y in batches]

    def accuracy(self, state: State) -> float:
        """Return the accuracy on the validation split, NaN without samples."""
        validation = self.validation
        if validation is None:
            return math.nan
        answers = self.answers(state, validation)
        if not answers:
            return math.nan
        hits = torch.cat([logits.argmax(1) == y for logits, y in answers])
        return float(hits.double().mean())
