"""Training of one stack: the phases of an exchange, for all its clients at once."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fl_lightning.client.context import ClientContext
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import LocalOptimizers
from fl_lightning.client.progress import LocalProgress
from fl_lightning.client.services import MetricAccumulator
from fl_lightning.engines.blocks import Block, begin_blocks, clip_rows, lay_out_like
from fl_lightning.engines.lockstep import Passes, equal_neighbors, lockstep
from fl_lightning.engines.pytrees import Stacked, StackingError
from fl_lightning.engines.stack import ClientStack, Step
from fl_lightning.engines.stack_batches import StackBatches
from fl_lightning.engines.stack_logits import StackLogits
from fl_lightning.engines.stacking import has_backward_hooks, why_not_optimizers
from fl_lightning.engines.training import LocalTrainer, matching
from fl_lightning.types import ClientJob, Phase, State

DEFAULT_PHASE = Phase()

EpochEnd = Callable[["StackedClient", State, LocalProgress, int], None]
"""`(stacked, its entries, its progress, epoch)`, at the end of each of its epochs."""


@dataclass
class StackedClient:
    """One client of a stack.

    Args:
        job: that it is to do.
        context: of the client.
        logged: values that it has logged.
        entries: of the module, as its training begins.
        phases: of the exchange.
        last_size: samples in its last batch.
        passed: epochs so far, by split.
    """

    job: ClientJob
    context: ClientContext
    logged: MetricAccumulator
    entries: State
    phases: Sequence[Phase]
    last_size: int = 1
    passed: Counter[str] = field(default_factory=Counter)

    def saw(self, num_samples: int) -> None:
        """Record the size of its last batch."""
        self.last_size = num_samples


class StackTrainer:
    """Runs the phases of several clients' training, one row of a stack each.

    Args:
        client: the module whose step is taken.
        local: trains single clients; its settings, optimizers and batch transfer are used.
        cautious: whether what differs from single clients by more than the last bits is refused (`auto`).
    """

    def __init__(self, client: ClientModule, local: LocalTrainer, cautious: bool = False) -> None:
        self.client = client
        self.local = local
        self._cautious = cautious

    def is_alone(self, job: ClientJob, phase: Phase = DEFAULT_PHASE) -> bool:
        """Return True for a client that must be alone in the module: BatchNorm sees batches of one sample."""
        if not self.local.batch_norms:
            return False
        size = job.data.size(phase.split)
        batch_size = job.data.samples_per_batch(phase.split, phase.batch_size)
        return size > 0 and 1 in (size, batch_size)

    def passes(self, job: ClientJob, phase: Phase = DEFAULT_PHASE) -> Passes:
        """Cut the samples of one client into the batches of a phase.

        Raises:
            StackingError: if BatchNorm sees batches of one sample.
        """
        if self.is_alone(job, phase):
            raise StackingError(f"BatchNorm would see batches of one sample of a client's {phase.split} split")
        return self.local.passes(job.data, phase)

    def clients_per_step(self, jobs: Sequence[ClientJob]) -> float:
        """Mean number of clients that take a step of an epoch together."""
        passes = sorted(map(self.passes, jobs))
        widths: list[int] = [rows.stop - rows.start for rows, _ in lockstep(passes)]
        return sum(widths) / max(1, len(widths))

    def train(
        self, stack: ClientStack, rows: Sequence[StackedClient], step: Step, on_epoch_end: EpochEnd | None = None
    ) -> None:
        """Train all phases.

        Args:
            stack: of the clients.
            rows: its clients, by row; all have the same phases.
            step: the training step of a client.
            on_epoch_end: called for each client after each of its epochs.
        """
        for phase in rows[0].phases:
            self.local.restore_modes()
            passes = [self.passes(stacked.job, phase) for stacked in rows]
            blocks = self._blocks(stack, rows, passes, phase)
            segment = _Segment(stack, rows, step, phase, passes, blocks, self._trained(stack, phase), on_epoch_end)
            self._epochs(segment)
            for optimizers in dict.fromkeys(block.optimizers for block in blocks):
                optimizers.begin(LocalProgress())  # lets go of the rows
            for block in blocks:
                for stacked in rows[block.rows]:
                    self._count(stacked, block, phase)

    def _count(self, stacked: StackedClient, block: Block, phase: Phase) -> None:
        """Add the steps of a phase to those of a client."""
        if block.progress.num_steps:
            stacked.saw(block.last_size)
        if phase.counts:
            progress = stacked.context.progress
            before = replace(stacked.context.progress)
            block.progress.add_to(progress)
            if phase.trains is not None and not matching(self.client.params(), phase.trains):
                progress.was_idle(before)
            stacked.passed[phase.split] += block.passes.epochs
        else:
            stacked.context.progress.uncounted_steps += block.progress.num_steps

    def _trained(self, stack: ClientStack, phase: Phase) -> list[str]:
        """Name the parameters that a phase trains."""
        if phase.trains is None:
            return list(stack.params)
        matched = matching(stack.params, phase.trains)
        names = [name for name in stack.params if name in matched]
        if not names:
            raise StackingError(f"Phase(trains={phase.trains}) names no parameter")
        return names

    # --- optimizers --------------------------------------------------------------------------------------------

    def _blocks(
        self, stack: ClientStack, rows: Sequence[StackedClient], passes: Sequence[Passes], phase: Phase
    ) -> list[Block]:
        """Make a block of neighbours with the same batches.

        Those without a sample are in none.

        All share an optimizer, unless it has schedulers.

        Raises:
            StackingError: if the client's optimizers do not step a stack.
        """
        taken = [cut if cut.steps else None for cut in passes]
        steps = [
            (stacked.context.progress.num_steps if phase.counts else 0, stacked.job.data.local_work) for stacked in rows
        ]
        blocks: list[Block] = []
        for part in equal_neighbors([None if pair[0] is None else pair for pair in zip(taken, steps, strict=True)]):
            shared = blocks and not blocks[-1].optimizers.schedulers  # else these change the rates of all
            optimizers = blocks[-1].optimizers if shared else self._optimizers(phase)
            blocks.append(Block(part, passes[part.start], optimizers, stack.select(part).params))
        params = dict(self.client.named_parameters())
        factor = self.local.settings.lr_factor(rows[0].job.data.round_idx)
        for optimizers in dict.fromkeys(block.optimizers for block in blocks):
            optimizers.begin(LocalProgress(), phase.lr, factor, self.local.lr_factors)
            begin_blocks([block for block in blocks if block.optimizers is optimizers], params)
        return blocks

    def _optimizers(self, phase: Phase) -> LocalOptimizers:
        """Build the optimizers of a phase, or take those at hand."""
        builder = self.local.builder
        optimizers = builder.at_hand(phase)
        if optimizers is None:
            if phase.trains is None:
                builder.forget()
            optimizers = builder.new()
        reason = why_not_optimizers(optimizers, only_sgd=bool(self.local.batch_norms) and self._cautious)
        if any(map(has_backward_hooks, self.client.parameters())):  # which building them may have put there
            reason = "a hook of a parameter would not be called"
        if reason is not None:
            optimizers.release()
            raise StackingError(reason)
        builder.keep(phase, optimizers)
        return optimizers

    def settings(self) -> dict[str, Any]:
        """Collect what the optimizers of the client in the module are set to, by name."""
        optimizers = self.local.builder.new()
        groups = [group for optimizer in optimizers.raw for group in optimizer.param_groups]
        optimizers.release()
        return {
            f"{name} of the optimizer's group {i}": float(value) if isinstance(value, Tensor) else value
            for i, group in enumerate(groups)
            for name, value in group.items()
            if name != "params"
        }

    # --- steps -------------------------------------------------------------------------------------------------

    def _epochs(self, segment: "_Segment") -> None:
        """Train all epochs of a phase."""
        rows = segment.rows
        passes = segment.passes
        phase = segment.phase
        left = [
            self.local.batch_limit(stacked.job.data, phase, cut, stacked.context.progress.num_steps)
            for stacked, cut in zip(rows, passes, strict=True)
        ]
        before = [stacked.passed[phase.split] if phase.counts else 0 for stacked in rows]
        logits = self._cache(segment)
        for epoch in range(max((block.passes.epochs for block in segment.blocks), default=0)):
            now = [cut.of_epoch(epoch, most) for cut, most in zip(passes, left, strict=True)]
            batches = StackBatches(
                [stacked.job.data for stacked in rows],
                phase.split,
                epochs=[earlier + epoch for earlier in before],
                batch_sizes=[cut.batch_size for cut in passes],
                with_index=phase.with_index or logits is not None,
                transfer=self.local.transfer,
                device=self.local.device,
            )
            for part, index in lockstep(now):
                cut = now[part.start]
                num_samples = cut.batch_size if index < cut.full else cut.tail
                taken = batches.take(part, index, num_samples)
                if logits is None:
                    self._step(segment, part, taken, index, num_samples)
                else:
                    (batch, positions), (dims, _) = taken
                    known = logits.of(part, positions) if epoch else {}
                    computed = self._step(segment, part, (batch, dims), index, num_samples, known)
                    logits.keep(part, positions, computed)
            for block in segment.blocks:
                if block.optimizers.schedulers and now[block.rows.start].steps:
                    self.local.builder.schedule(block.optimizers.schedulers, "epoch", epoch + 1)
            if segment.on_epoch_end is not None:
                self._end_epoch(segment, now, epoch, segment.on_epoch_end)

    def _end_epoch(self, segment: "_Segment", now: Sequence[Passes], epoch: int, on_epoch_end: EpochEnd) -> None:
        """Show the clients that had the epoch, each with its steps so far."""
        states = segment.stack.list_states()
        for block in segment.blocks:
            if not now[block.rows.start].steps:
                continue
            for row in range(block.rows.start, block.rows.stop):
                stacked = segment.rows[row]
                stacked.saw(block.last_size)
                progress = replace(stacked.context.progress)
                if segment.phase.counts:
                    block.progress.add_to(progress)
                on_epoch_end(stacked, states[row], progress, epoch)

    def _cache(self, segment: "_Segment") -> StackLogits | None:
        """Make a cache of teachers' logits where every sample comes back unchanged in each epoch."""
        phase = segment.phase
        passes = segment.passes
        views = [stacked.job.data for stacked in segment.rows]
        if not self.client.distils or all(cut.epochs <= 1 for cut in passes):
            return None
        pairs = zip(views, passes, strict=True)
        unchanged = all(self.local.repeats_samples(view, phase, cut) for view, cut in pairs)
        return StackLogits([view.size(phase.split) for view in views]) if unchanged else None

    def _step(
        self,
        segment: "_Segment",
        part: slice,
        batches: Stacked,
        index: int,
        num_samples: int,
        known: State | None = None,
    ) -> State:
        """Take one step of the clients of some rows.

        Returns teachers' logits that were computed (`ClientStack`).
        """
        rows = segment.stack.select(part)
        logged = [stacked.logged for stacked in segment.rows[part]]
        gradients, logits = segment.stack.differentiate(
            rows,
            batches,
            index=index,
            trained=segment.trained,
            step=segment.step,
            services=self.local.services,
            logged=logged,
            known=known,
        )
        if self.local.settings.clip_norm is not None:
            gradients = clip_rows(gradients, self.local.settings.clip_norm)
        gradients = lay_out_like(rows.params, gradients)
        blocks = [block for block in segment.blocks if part.start <= block.rows.start < part.stop]
        for block in blocks:
            block.take_gradients(gradients, part, num_samples)
        for optimizers in dict.fromkeys(block.optimizers for block in blocks):
            optimizers.wrapped[0].step()
        for block in blocks:
            block.finish_step()
            if block.optimizers.schedulers:
                self.local.builder.schedule(block.optimizers.schedulers, "step", block.accumulated_lr.steps)
        return logits


@dataclass(frozen=True)
class _Segment:
    """One phase of a stack.

    Args:
        stack: of the clients.
        rows: its clients, by row.
        step: the training step of a client.
        phase: in training.
        passes: batches by row.
        blocks: rows by optimizer.
        trained: names of the parameters that are trained.
        on_epoch_end: called for each client after each of its epochs; or None.
    """

    stack: ClientStack
    rows: Sequence[StackedClient]
    step: Step
    phase: Phase
    passes: Sequence[Passes]
    blocks: Sequence[Block]
    trained: Sequence[str]
    on_epoch_end: EpochEnd | None


def common_phases(clients: Sequence[StackedClient]) -> Sequence[Phase]:
    """Choose the phases of all clients.

    Raises:
        StackingError: if they differ, or need one client at a time.
    """
    if any(phase.indices is not None for stacked in clients for phase in stacked.phases):
        raise StackingError("a phase has indices, which are one client's")
    phases = clients[0].phases
    if any(stacked.phases is not phases and list(stacked.phases) != list(phases) for stacked in clients):
        raise StackingError("its clients have different phases")
    return phases
