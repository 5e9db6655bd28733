"""Training of one stack: the phases of an exchange, for all its clients at once."""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from fl_lightning.client.context import ClientContext
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import LocalOptimizers
from fl_lightning.client.progress import ClientProgress
from fl_lightning.client.services import MetricAccumulator
from fl_lightning.engines.blocks import Block, begin_blocks, clip_rows, lay_out_like
from fl_lightning.engines.clock import NO_WORK, Work
from fl_lightning.engines.draws import SharedDraws
from fl_lightning.engines.lockstep import Passes, equal_neighbors, lockstep
from fl_lightning.engines.pytrees import Stacked, StackingError
from fl_lightning.engines.stack import ClientStack, Step
from fl_lightning.engines.stack_batches import StackBatches
from fl_lightning.engines.stack_logits import StackLogits
from fl_lightning.engines.stacking import has_backward_hooks, why_not_optimizers
from fl_lightning.engines.training import LocalTrainer, matching
from fl_lightning.types import ClientJob, Phase, State

DEFAULT_PHASE = Phase()


@dataclass
class StackedClient:
    """Holds one client of a stack.

    Args:
        job: The job of the client.
        context: The context of the client.
        logged: The values that the client has logged.
        entries: The entries of the module as the training begins.
        phases: The phases of the exchange.
        last_size: The number of samples in the last batch of the client.
        past_epochs: The number of epochs of the phases before, by split.
    """

    job: ClientJob
    context: ClientContext
    logged: MetricAccumulator
    entries: State
    phases: Sequence[Phase]
    last_size: int = 1
    past_epochs: Counter[str] = field(default_factory=Counter)


class EpochEnd(Protocol):
    """Receives each client of a stack at the end of each of its epochs."""

    def __call__(self, stacked: StackedClient, state: State, progress: ClientProgress, epoch: int) -> None:
        """Take a client after an epoch.

        Args:
            stacked: The client.
            state: The entries of the client, in the memory of the stack.
            progress: The progress of the client so far.
            epoch: The index of the epoch in its phase.
        """


@dataclass(frozen=True)
class StackPhase:
    """Holds what is fixed during one phase of a stack.

    Args:
        stack: The stack.
        clients: The clients of the stack, by row.
        step: The training step of a client.
        phase: The phase.
        passes: The batches of the phase, by row.
        blocks: The blocks of rows. A row without a sample is in no block.
        trained: The names of the parameters that are trained.
        on_epoch_end: Called for each client at the end of each of its epochs. None: nobody is called.
    """

    stack: ClientStack
    clients: Sequence[StackedClient]
    step: Step
    phase: Phase
    passes: Sequence[Passes]
    blocks: Sequence[Block]
    trained: Sequence[str]
    on_epoch_end: EpochEnd | None


class StackTrainer:
    """Runs the phases of the training of several clients, one row of a stack for each client.

    Args:
        client: The client module, whose step is taken.
        local: Trains single clients. Its settings, optimizers and batch transfer are used.
        cautious: Whether a stack is refused whose results differ from those of single clients by more than the last
            bits (`auto`).

    Attributes:
        draws: Watches over the random generators that are seeded for one client at a time.
    """

    def __init__(self, client: ClientModule, local: LocalTrainer, *, cautious: bool = False) -> None:
        self.client = client
        self.local = local
        self._cautious = cautious
        self.draws = SharedDraws(local.device, local.own_generators)

    def is_alone(self, job: ClientJob, phase: Phase = DEFAULT_PHASE) -> bool:
        """Return True if the client must be alone in the module, because BatchNorm sees batches of one sample."""
        if not self.local.batch_norms:
            return False
        size = job.data.size(phase.split)
        batch_size = job.data.samples_per_batch(phase.split, phase.batch_size)
        return size > 0 and 1 in (size, batch_size)

    def passes(self, job: ClientJob, phase: Phase = DEFAULT_PHASE) -> Passes:
        """Divide the samples of one client into the batches of a phase.

        Raises:
            StackingError: BatchNorm sees batches of one sample.
        """
        if self.is_alone(job, phase):
            raise StackingError(f"BatchNorm would see batches of one sample of a client's {phase.split} split")
        return self.local.passes(job.data, phase)

    def clients_per_step(self, jobs: Sequence[ClientJob]) -> float:
        """Return the mean number of clients that take a step of an epoch together."""
        passes = sorted(self.passes(job) for job in jobs)
        widths: list[int] = [rows.stop - rows.start for rows, _ in lockstep(passes)]
        return sum(widths) / max(1, len(widths))

    def train(
        self,
        stack: ClientStack,
        clients: Sequence[StackedClient],
        step: Step,
        on_epoch_end: EpochEnd | None = None,
    ) -> None:
        """Train all phases.

        Args:
            stack: The stack.
            clients: The clients of the stack, by row. All of them have the same phases.
            step: The training step of a client.
            on_epoch_end: Called for each client at the end of each of its epochs. None: nobody is called.
        """
        with self.local.attached_clock():
            self._train(stack, clients, step=step, on_epoch_end=on_epoch_end)

    def _train(
        self,
        stack: ClientStack,
        clients: Sequence[StackedClient],
        *,
        step: Step,
        on_epoch_end: EpochEnd | None,
    ) -> None:
        """Train all phases as `train` does, with the arguments of `train`."""
        for phase in clients[0].phases:
            self.local.restore_modes()
            passes = [self.passes(stacked.job, phase) for stacked in clients]
            blocks = self._begin_blocks(stack, clients, passes=passes, phase=phase)
            current = StackPhase(
                stack=stack,
                clients=clients,
                step=step,
                phase=phase,
                passes=passes,
                blocks=blocks,
                trained=trained_names(stack, phase),
                on_epoch_end=on_epoch_end,
            )
            self._run_epochs(current)
            for optimizers in optimizers_of(blocks):
                # The optimizers release the rows.
                optimizers.begin(ClientProgress())
            for block in blocks:
                for stacked in clients[block.rows]:
                    self._count(stacked, block, phase)

    def _count(self, stacked: StackedClient, block: Block, phase: Phase) -> None:
        """Add the steps of a phase to the steps of a client."""
        if block.progress.num_steps:
            stacked.last_size = block.last_size
        progress = stacked.context.progress
        if not phase.counts:
            progress.uncounted_steps += block.progress.num_steps
            return
        before = replace(progress)
        block.progress.add_to(progress)
        if phase.trains is not None and not matching(self.client.params(), phase.trains):
            progress.was_idle(before)
        stacked.past_epochs[phase.split] += block.passes.epochs

    # --- optimizers ---

    def _begin_blocks(
        self, stack: ClientStack, clients: Sequence[StackedClient], *, passes: Sequence[Passes], phase: Phase
    ) -> list[Block]:
        """Make the blocks of a phase and their optimizers, ready to train.

        All blocks share an optimizer. Each block has its own with schedulers, because these change its learning rates,
        and if the module asks for numbers that differ between clients when it makes the optimizer.

        Args:
            stack: The stack.
            clients: The clients of the stack, by row.
            passes: The batches of the phase, by row.
            phase: The phase.

        Raises:
            StackingError: The optimizers of the client do not step a stack.
        """
        blocks: list[Block] = []
        optimizers: LocalOptimizers | None = None
        has_own = True
        clock = self.local.clock
        for rows in equal_neighbors(block_keys(clients, passes, phase)):
            work = NO_WORK
            if self.local.tells_clock:
                work = self._work(clients[rows.start], phase, passes[rows.start])
                clock.begin(work, kind=phase.clock, progress=ClientProgress())
            if optimizers is None or has_own:
                clock.asked = False
                optimizers = self._optimizers(phase)
                has_own = bool(optimizers.schedulers) or clock.asked
            params = stack.select(rows).params
            block = Block(
                rows=rows,
                passes=passes[rows.start],
                optimizers=optimizers,
                params=params,
                work=work,
            )
            blocks.append(block)
        module_params = dict(self.client.named_parameters())
        lr_factor = self.local.settings.lr_factor(clients[0].job.data.round_idx)
        for optimizers in optimizers_of(blocks):
            optimizers.begin(ClientProgress(), lr=phase.lr, factor=lr_factor, factors=self.local.lr_factors)
            of_optimizers = [block for block in blocks if block.optimizers is optimizers]
            begin_blocks(of_optimizers, module_params)
            if optimizers.schedulers:
                # With schedulers there is one block.
                block = of_optimizers[0]
                block.work = self._work(clients[block.rows.start], phase, block.passes)
                clock.begin(block.work, kind=phase.clock, progress=block.progress)
                self.local.schedules.catch_up(optimizers)
        return blocks

    def _work(self, stacked: StackedClient, phase: Phase, passes: Passes) -> Work:
        """Return what a client trains in a phase.

        Args:
            stacked: The client.
            phase: The phase.
            passes: The batches of the phase.
        """
        num_steps = stacked.context.progress.num_steps if phase.counts else 0
        return self.local.work(phase, stacked.job.data, passes=passes, num_steps=num_steps)

    def _optimizers(self, phase: Phase) -> LocalOptimizers:
        """Return the optimizers of a phase, built anew or used again.

        Raises:
            StackingError: The optimizers do not step a stack.
        """
        builder = self.local.builder
        optimizers = builder.at_hand(phase)
        if optimizers is None:
            if phase.trains is None:
                builder.forget()
            optimizers = builder.new()
        only_sgd = bool(self.local.batch_norms) and self._cautious
        reason = why_not_optimizers(optimizers, only_sgd=only_sgd)
        # The user's configure_optimizers may have registered hooks.
        if any(has_backward_hooks(parameter) for parameter in self.client.parameters()):
            reason = "a hook of a parameter would not be called"
        if reason is not None:
            optimizers.release()
            raise StackingError(reason)
        builder.keep(phase, optimizers)
        return optimizers

    def optimizer_settings(self, stacked: StackedClient) -> dict[str, Any]:
        """Return the settings of the optimizers of the client in the module, by name.

        Args:
            stacked: The client in the module.
        """
        if self.local.tells_clock and stacked.phases:
            phase = stacked.phases[0]
            work = self._work(stacked, phase, self.passes(stacked.job, phase))
            self.local.clock.begin(work, kind=phase.clock, progress=ClientProgress())
        with self.local.attached_clock():
            optimizers = self.local.builder.new()
        groups: list[dict[str, Any]] = []
        for optimizer in optimizers.raw:
            groups += optimizer.param_groups
        optimizers.release()
        settings = {}
        for group_idx, group in enumerate(groups):
            for name, value in group.items():
                if name != "params":
                    key = f"{name} of the optimizer's group {group_idx}"
                    settings[key] = float(value) if isinstance(value, Tensor) else value
        return settings

    # --- steps ---

    def _run_epochs(self, current: StackPhase) -> None:
        """Train all epochs of a phase."""
        phase = current.phase
        batch_limits = [
            self.local.batch_limit(
                data=stacked.job.data,
                phase=phase,
                passes=passes,
                num_steps=stacked.context.progress.num_steps,
            )
            for stacked, passes in zip(current.clients, current.passes, strict=True)
        ]
        logits = self._make_logits(current)
        num_epochs = max((block.passes.epochs for block in current.blocks), default=0)
        for epoch in range(num_epochs):
            passes_of_epoch = [
                passes.of_epoch(epoch, limit) for passes, limit in zip(current.passes, batch_limits, strict=True)
            ]
            self._run_epoch(current, epoch=epoch, passes=passes_of_epoch, logits=logits)
            blocks = [block for block in current.blocks if passes_of_epoch[block.rows.start].steps]
            for block in blocks:
                if block.optimizers.schedulers:
                    self._resume_clock(block, phase, epoch=epoch, index=block.work.batches[epoch] - 1)
                    self.local.schedules.end_epoch(block.optimizers)
            if current.on_epoch_end is not None:
                end_epoch(current, blocks, epoch=epoch, on_epoch_end=current.on_epoch_end)

    def _resume_clock(self, block: Block, phase: Phase, *, epoch: int, index: int) -> None:
        """Let the clock go back to the clients of a block.

        Args:
            block: The block.
            phase: The phase of the block.
            epoch: The index of the epoch in the phase.
            index: The index of the batch in the epoch.
        """
        self.local.clock.resume(block.work, kind=phase.clock, progress=block.progress, epoch=epoch, index=index)

    def _run_epoch(
        self, current: StackPhase, *, epoch: int, passes: Sequence[Passes], logits: StackLogits | None
    ) -> None:
        """Train one epoch.

        Args:
            current: The phase.
            epoch: The index of the epoch in the phase.
            passes: The batches of the epoch, by row.
            logits: Keeps teachers' logits from the first epoch on. None: no logits are kept.
        """
        batches = self._make_batches(current, epoch=epoch, with_positions=logits is not None)
        # A client's samples seed the generators of Python and NumPy as an epoch begins.
        self.draws.restart()
        for rows, index in lockstep(passes):
            first = passes[rows.start]
            num_samples = first.batch_size if index < first.full else first.tail
            stacked_batch = batches.take(rows, index, num_samples)
            if logits is None:
                self._step(
                    current,
                    rows,
                    stacked_batch,
                    epoch=epoch,
                    index=index,
                    num_samples=num_samples,
                )
                continue
            (batch, positions), (batch_dims, _) = stacked_batch
            computed = self._step(
                current,
                rows,
                (batch, batch_dims),
                epoch=epoch,
                index=index,
                num_samples=num_samples,
                known=logits.of(rows, positions) if epoch else {},
            )
            logits.keep(rows, positions, computed)
        self.draws.check("its samples or its step")

    def _make_batches(self, current: StackPhase, *, epoch: int, with_positions: bool) -> StackBatches:
        """Make the batches of one epoch.

        Args:
            current: The phase.
            epoch: The index of the epoch in the phase.
            with_positions: Whether the trainer needs the positions of the samples.
        """
        phase = current.phase
        return StackBatches(
            [stacked.job.data for stacked in current.clients],
            phase.split,
            # A phase that does not count has the batches of the first epochs.
            epochs=[stacked.past_epochs[phase.split] + epoch if phase.counts else epoch for stacked in current.clients],
            batch_sizes=[passes.batch_size for passes in current.passes],
            with_index=phase.with_index or with_positions,
            transfer=self.local.transfer,
            device=self.local.device,
        )

    def _make_logits(self, current: StackPhase) -> StackLogits | None:
        """Make a cache of teachers' logits if every epoch has the same unchanged samples."""
        if not self.client.distils or all(passes.epochs <= 1 for passes in current.passes):
            return None
        views = [stacked.job.data for stacked in current.clients]
        for view, passes in zip(views, current.passes, strict=True):
            if not self.local.repeats_samples(view, current.phase, passes):
                return None
        return StackLogits([view.size(current.phase.split) for view in views])

    def _step(
        self,
        current: StackPhase,
        rows: slice,
        batches: Stacked,
        *,
        epoch: int,
        index: int,
        num_samples: int,
        known: State | None = None,
    ) -> State:
        """Take one step of the clients of some rows, and return the teachers' logits that were computed.

        Args:
            current: The phase.
            rows: The rows of the step.
            batches: The batches of the rows.
            epoch: The index of the epoch in the phase.
            index: The index of the batch in its epoch.
            num_samples: The number of samples in the batch of each row.
            known: The known logits of the batches by teacher. None: no logits are kept.
        """
        selected = current.stack.select(rows)
        blocks = [block for block in current.blocks if rows.start <= block.rows.start < rows.stop]
        works = [block.work for block in blocks]
        with self.local.clock.in_stack(works, epoch) if self.local.tells_clock else nullcontext():
            gradients, logits = current.stack.differentiate(
                selected,
                batches,
                index=index,
                trained=current.trained,
                step=current.step,
                services=self.local.services,
                logged=[stacked.logged for stacked in current.clients[rows]],
                known=known,
            )
        if self.local.settings.clip_norm is not None:
            gradients = clip_rows(gradients, self.local.settings.clip_norm)
        gradients = lay_out_like(selected.params, gradients)
        for block in blocks:
            block.take_gradients(gradients, rows, num_samples)
        for optimizers in optimizers_of(blocks):
            optimizers.wrapped[0].step()
        for block in blocks:
            block.finish_step()
            if block.optimizers.schedulers:
                self._resume_clock(block, current.phase, epoch=epoch, index=index)
                self.local.schedules.end_step(block.optimizers, index)
        return logits


def optimizers_of(blocks: Iterable[Block]) -> Iterable[LocalOptimizers]:
    """Return the optimizers of some blocks in order, each once."""
    return dict.fromkeys([block.optimizers for block in blocks])


def trained_names(stack: ClientStack, phase: Phase) -> list[str]:
    """Return the names of the parameters that a phase trains, in the order of the stack.

    Raises:
        StackingError: The phase names no parameter.
    """
    if phase.trains is None:
        return list(stack.params)
    matched = matching(stack.params, phase.trains)
    if not matched:
        raise StackingError(f"Phase(trains={phase.trains}) names no parameter")
    return [name for name in stack.params if name in matched]


def block_keys(
    clients: Sequence[StackedClient], passes: Sequence[Passes], phase: Phase
) -> list[tuple[Passes, int, float] | None]:
    """Return a key for each row. Neighbors with equal keys have the same batches in every epoch.

    Args:
        clients: The clients, by row.
        passes: The batches of the phase, by row.
        phase: The phase.

    Returns:
        The keys. A row without a sample has the key None.
    """
    keys: list[tuple[Passes, int, float] | None] = []
    for stacked, own_passes in zip(clients, passes, strict=True):
        if own_passes.steps == 0:
            keys.append(None)
            continue
        # The limit of batches depends on both.
        num_steps = stacked.context.progress.num_steps if phase.counts else 0
        keys.append((own_passes, num_steps, stacked.job.data.local_work))
    return keys


def end_epoch(current: StackPhase, blocks: Sequence[Block], *, epoch: int, on_epoch_end: EpochEnd) -> None:
    """Call `on_epoch_end` for the clients that had the epoch.

    Args:
        current: The phase.
        blocks: The blocks of these clients.
        epoch: The index of the epoch in the phase.
        on_epoch_end: Called for each client.
    """
    states = current.stack.list_states()
    for block in blocks:
        for row in range(block.rows.start, block.rows.stop):
            stacked = current.clients[row]
            stacked.last_size = block.last_size
            progress = replace(stacked.context.progress)
            if current.phase.counts:
                block.progress.add_to(progress)
            on_epoch_end(stacked=stacked, state=states[row], progress=progress, epoch=epoch)


def common_phases(clients: Sequence[StackedClient]) -> Sequence[Phase]:
    """Return the phases of all clients.

    Raises:
        StackingError: The phases differ, or the samples of a phase are those of one client.
    """
    phases = clients[0].phases
    for stacked in clients:
        if any(phase.indices is not None for phase in stacked.phases):
            raise StackingError("a phase has indices, which are one client's")
    for stacked in clients:
        if stacked.phases is not phases and list(stacked.phases) != list(phases):
            raise StackingError("its clients have different phases")
    return phases
