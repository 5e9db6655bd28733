"""The cohort engine: trains several clients at once, as rows of one stack, and one after the other where it cannot."""

import copy
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from fl_lightning.client.context import ClientContext
from fl_lightning.client.hooks import overridden
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import LocalOptimizers
from fl_lightning.client.services import MetricAccumulator
from fl_lightning.client.teacher import BATCH_NORMS
from fl_lightning.federation.blocks import Block
from fl_lightning.federation.engine import SequentialEngine
from fl_lightning.federation.faults import client_error
from fl_lightning.federation.lockstep import Passes, lockstep, runs
from fl_lightning.federation.stack import ClientStack, StackingError
from fl_lightning.federation.stacking import Chunk, clients_at_once, why_not, why_not_optimizers
from fl_lightning.types import Batch, ClientJob, ClientResult, State
from fl_lightning.utils.settings import check_at_least


@dataclass(frozen=True)
class Member:
    """One client of a stack.

    Args:
        job: that it is to do.
        context: of the client.
        logged: values that it has logged.
        entries: of the module, as its training begins.
        passes: the batches of its epochs.
    """

    job: ClientJob
    context: ClientContext
    logged: MetricAccumulator
    entries: State
    passes: Passes


class CohortEngine(SequentialEngine):
    """Trains up to `chunk` clients at once (the `Engine` protocol).

    Results are those of the sequential engine up to the order of floating-point sums. The first stack of an exchange
    is a trial: where it fails, its clients and all later ones are trained one after the other, and one line says why.

    Args:
        client, settings, weights, services, device, precision, datamodule, hooks: as of `SequentialEngine`.
        chunk: clients in a stack; `auto`: chosen, and only where it is known to be right and faster.
        tolerant: whether clients that fail are left out, which takes one at a time.
    """

    def __init__(self, *args: Any, chunk: Chunk = "auto", tolerant: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_at_least(1, chunk=None if chunk == "auto" else chunk)
        self.chunk, self.tolerant = chunk, tolerant
        self._refused: str | None = None
        self._proven: set[str] = set()
        self._told: set[str] = set()
        self._has_batch_norm = any(isinstance(module, BATCH_NORMS) for module in self.client.modules())
        self._spare: list[LocalOptimizers] = []
        """Optimizers by block, to be used again."""

    def why_not(self) -> str | None:
        """Say why clients are trained one after the other; None: they are not."""
        if self._refused is not None:
            return self._refused
        if self.tolerant:
            return "model.on_error=skip leaves out single clients"
        if self.hooks.get("on_client_epoch_end"):
            return "a callback's on_client_epoch_end is called for one client at a time"
        local = self.local
        return why_not(self.client, local.settings, self.chunk, self.weights, local.precision, local.device)

    def _results(
        self, exchange: str, jobs: Iterable[ClientJob], announces: bool = True
    ) -> Generator[ClientResult, None, None]:
        """Train the jobs in stacks, or one after the other."""
        most, reason = clients_at_once(self.client, self.chunk), self.why_not()
        if reason is not None or most == 1:
            self._tell(reason)
            yield from super()._results(exchange, jobs)
            return
        waiting: list[ClientJob] = []
        for job in jobs:
            alone = self._is_alone(job)
            if not alone:
                waiting.append(job)
            if alone or len(waiting) == most:
                yield from self._together(exchange, waiting)
                waiting = []
            if alone:
                yield from super()._results(exchange, [job])
        yield from self._together(exchange, waiting)

    def _tell(self, reason: str | None) -> None:
        if reason is not None and reason not in self._told:
            self._told.add(reason)
            rank_zero_info(f"Clients are trained one after the other (model.chunk={self.chunk}): {reason}")

    def _is_alone(self, job: ClientJob) -> bool:
        """True for a client that must be alone in the module: one of one sample has its BatchNorm in eval mode."""
        return self._has_batch_norm and (job.data.size() == 1 or job.data.samples_per_batch("train") == 1)

    def _together(self, exchange: str, jobs: Sequence[ClientJob]) -> Iterator[ClientResult]:
        """Train the jobs as one stack, if it is not refused."""
        if len(jobs) < 2 or self._refused is not None:
            yield from super()._results(exchange, jobs)
            return
        proven = exchange in self._proven
        again = jobs if proven else [job._replace(memory=copy.deepcopy(job.memory)) for job in jobs]
        try:
            members = self._train_stack(exchange, jobs)
        except Exception as error:
            self._forget_spare()
            if proven:
                raise self._stack_error(jobs, error) from error
            self._refused = str(error) if isinstance(error, StackingError) else f"{type(error).__name__}: {error}"
            self._tell(self._refused)
            yield from super()._results(exchange, again, announces=False)
            return
        checks = True
        for member, state, weight in members:
            try:
                result = self._finish(exchange, member, state, weight, checks)
            except Exception as error:
                raise client_error(member.job.client_id, member.job.broadcast.round_idx, error) from error
            checks = self._replies  # what else happens between two results of a stack leaves the module alone
            yield result

    def _train_stack(self, exchange: str, jobs: Sequence[ClientJob]) -> Iterator[tuple[Member, State, int]]:
        """Train the jobs as one stack; gives, in their order, each client, its entries and the size of its last batch.

        Raises:
            StackingError: if they cannot be stacked.
        """
        members = [self._join(exchange, job) for job in jobs]
        self._check_teachers(members)
        order = sorted(range(len(jobs)), key=lambda place: members[place].passes)
        rows = [members[place] for place in order]
        states, contexts = [one.entries for one in rows], [one.context for one in rows]
        stack = ClientStack(self.client, states, contexts, self.weights.entries, self.weights.tied)
        blocks = self._blocks(stack, rows)
        self.local.restore_modes()
        self._train_blocks(stack, blocks, rows)
        if any(block.progress.num_steps for block in blocks):
            self._proven.add(exchange)
        sizes = [1] * len(rows)
        for block in blocks:
            block.end()
            for row in range(block.rows.start, block.rows.stop):
                rows[row] = replace(rows[row], context=replace(contexts[row], progress=block.progress))
                sizes[row] = block.last_size
        return ((rows[row], stack.state(row), sizes[row]) for row in sorted(range(len(rows)), key=order.__getitem__))

    def _join(self, exchange: str, job: ClientJob) -> Member:
        """Make the module the client of a job, and copy what it is before training."""
        start = job.broadcast.weights if job.start is None else job.start
        prepares = (self._receives and not self._neutral) or self.hooks.get("on_client_start")
        if start is not None and len(start) == len(self.weights.entries) and not prepares:
            context, logged = self._context(job), self.services.begin_client()
            entries = start  # all that it starts from: nobody looks at the module
        else:
            context, logged = self._receive(exchange, job, announces=True)
            entries = self.weights.snapshot(self.weights.entries)
        epochs, data, size = self.local.settings.local_epochs, job.data, job.data.size()
        epochs = epochs[job.client_id] if isinstance(epochs, list) else epochs
        passes = Passes.over(size, data.samples_per_batch("train"), epochs, self._has_batch_norm)
        return Member(job, context, logged, entries, passes)

    def _check_teachers(self, members: Sequence[Member]) -> None:
        """Refuse clients with teachers of their own: there is one teacher for the whole stack.

        Raises:
            StackingError: if they have.
        """
        token = members[0].context.weights_token
        alike = all(member.context.weights_token is token for member in members)
        if self._receives and not self._neutral and not self.client.teaches_alike(token if alike else None):
            raise StackingError("its clients have different teachers")

    def _blocks(self, stack: ClientStack, rows: Sequence[Member]) -> list[Block]:
        """Make a block of all clients with the same batches; those without a sample are in none.

        Raises:
            StackingError: if the client's optimizers do not step a stack.
        """
        local, params = self.local, dict(self.client.named_parameters())
        found: list[Block] = []
        for part in runs([member.passes for member in rows], lambda own: own if own.steps else None):
            optimizers = self._optimizers(len(found))
            first = rows[part.start]
            found.append(Block(part, first.passes, optimizers, stack.rows(part).params))
            factor = local.settings.lr_decay**first.job.data.round_idx
            found[-1].begin(params, factor, local.lr_factors)
        return found

    def _optimizers(self, place: int) -> LocalOptimizers:
        """Build the optimizers of a block, or take those at hand."""
        if place < len(self._spare):
            return self._spare[place]
        found = self.local.new_optimizers()
        if reason := why_not_optimizers(found.raw):
            raise StackingError(reason)
        if found.reusable and not overridden(self.modules[-1], "configure_optimizers", ClientModule):
            self._spare.append(found)
        return found

    def _forget_spare(self) -> None:
        for optimizers in self._spare:
            optimizers.release()
        self._spare = []

    def _train_blocks(self, stack: ClientStack, blocks: Sequence[Block], rows: Sequence[Member]) -> None:
        """Train all epochs of all clients."""
        limit = self.local.settings.max_local_steps
        for epoch in range(max((block.passes.epochs for block in blocks), default=0)):
            now = [member.passes.of_epoch(epoch, limit) for member in rows]
            batches = [iter(one.job.data.batches("train", epoch, one.passes.batch_size)) for one in rows]
            for part, index in lockstep(now):
                taken = [self.local.transfer(next(batches[row])) for row in range(part.start, part.stop)]
                stepped = [block for block in blocks if part.start <= block.rows.start < part.stop]
                own = now[part.start]
                size = own.batch_size if index < own.full else own.tail
                self._step(stack, part, stepped, rows[part], taken, index, size)
            for block in blocks:
                if block.optimizers.schedulers and now[block.rows.start].steps:
                    self.local.schedule(block.optimizers.schedulers, "epoch", epoch + 1)

    def _step(
        self,
        stack: ClientStack,
        part: slice,
        blocks: Sequence[Block],
        members: Sequence[Member],
        batches: Sequence[Batch],
        index: int,
        num_samples: int,
    ) -> None:
        """Take one step of the clients of some rows."""
        client, rows = self.client, stack.rows(part)
        step = client.local_loss if self._neutral else client.training_step
        losses, logged = stack.losses(rows, step, batches, index, self.services)
        found = torch.autograd.grad(losses.sum(), list(rows.params.values()), allow_unused=True)
        gradients = dict(zip(rows.params, found, strict=True))
        for block in blocks:
            own = slice(block.rows.start - part.start, block.rows.stop - part.start)
            of_block = {name: None if value is None else value[own] for name, value in gradients.items()}
            block.step(of_block, self.local.settings.clip_norm, num_samples)
            if block.optimizers.schedulers:
                self.local.schedule(block.optimizers.schedulers, "step", block.optimizers.exposure.steps)
        for one in logged:
            values = one.values.unbind() if isinstance(one.values, Tensor) else [one.values] * len(members)
            for member, value in zip(members, values, strict=True):
                member.logged.log(one.name, value, one.weight, one.reduction)

    def _finish(self, exchange: str, member: Member, state: State, num_samples: int, checks: bool) -> ClientResult:
        """Make a trained client's result, which is in the module again."""
        self.weights.load(state)
        self.client.begin(member.context)
        self.services.resume_client(member.logged, num_samples)
        if self._replies or self.hooks.get("on_client_end"):
            self.local.seed(f"train/{exchange}", member.job.data)  # what they draw does not depend on other clients
        return self._reply(exchange, member.job, member.context, member.logged, checks)

    def _stack_error(self, jobs: Sequence[ClientJob], error: Exception) -> Exception:
        """Name the clients of a stack that failed after earlier ones did not."""
        ids = ", ".join(str(job.client_id) for job in jobs)
        return RuntimeError(
            f"clients {ids}, trained at once in round {jobs[0].broadcast.round_idx}, raised {type(error).__name__}: "
            f"{error}; set model.chunk=1 to see which of them it is"
        )
