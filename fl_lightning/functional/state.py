"""Arithmetic on states (dicts of tensors by name). Every function returns new tensors but `add_`."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

State = dict[str, Tensor]
"""Tensors by name."""
StateLike = Mapping[str, Tensor]
PIECE = 2**16
"""Numbers in a piece of a long vector."""
Layout = dict[str, tuple[torch.Size, torch.dtype]]
"""Shape and type of every entry, in order."""
Vectors = dict[torch.dtype, Tensor]
"""Entries that are laid end to end, by their type."""


def add(a: StateLike, b: StateLike, alpha: float = 1.0) -> State:
    """Add states, a + alpha · b, entry by entry.

    >>> add({"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}, alpha=0.5)
    {'w': tensor([2.])}
    """
    return {name: tensor + alpha * b[name] for name, tensor in a.items()}


def sub(a: StateLike, b: StateLike) -> State:
    """Subtract states, a − b, entry by entry.

    >>> sub({"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])})
    {'w': tensor([-1.])}
    """
    return {name: tensor - b[name] for name, tensor in a.items()}


def scale(a: StateLike, factor: float) -> State:
    """Multiply a state, factor · a.

    >>> scale({"w": torch.tensor([1.0])}, 3)
    {'w': tensor([3.])}
    """
    return {name: tensor * factor for name, tensor in a.items()}


def zeros_like(a: StateLike) -> State:
    """Make zeros of the same shapes and types.

    >>> zeros_like({"w": torch.tensor([1.0])})
    {'w': tensor([0.])}
    """
    return {name: torch.zeros_like(tensor) for name, tensor in a.items()}


def clone(a: StateLike) -> State:
    """Copy all entries, detached.

    >>> clone({"w": torch.tensor([1.0], requires_grad=True)})
    {'w': tensor([1.])}
    """
    return {name: tensor.detach().clone() for name, tensor in a.items()}


def inner(a: StateLike, b: StateLike) -> Tensor:
    """Compute the inner product Σ a·b over all entries, 0-d in float32 or better, 0 without entries.

    >>> inner({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 4.0])})
    tensor(11.)
    """
    terms = [(to_float32(tensor) * to_float32(b[name])).sum() for name, tensor in a.items()]
    return torch.stack(terms).sum() if terms else torch.zeros(())


@torch.no_grad()
def add_(a: StateLike, b: StateLike, alpha: float = 1.0) -> None:
    """Add alpha · b to a in place, for the server's own buffers, in the types of `a`.

    >>> a = {"w": torch.tensor([1.0])}
    >>> add_(a, {"w": torch.tensor([2.0])}, 0.5); a
    {'w': tensor([2.])}
    """
    for name, tensor in a.items():
        tensor.add_(b[name], alpha=alpha)


def to_float32(x: Tensor) -> Tensor:
    """Raise half types to float32 and leave everything else: sums are never taken in half precision.

    >>> to_float32(torch.ones(1, dtype=torch.bfloat16)).dtype, to_float32(torch.ones(1, dtype=torch.float64)).dtype
    (torch.float32, torch.float64)
    """
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class FlatState(dict[str, Tensor]):
    """A state that is laid end to end at most once, whoever asks, until an entry is replaced.

    No entry may be edited in place meanwhile.

    Args:
        entries: tensors by name.
        vectors: result of `flatten`, where it is known.
        scratch: where they are laid, by type, kept from one such state to the next, which overwrites it; None: anew.
        greatest: greatest magnitude of the floating entries of each type, 0-d float64, where they are known.
    """

    def __init__(
        self,
        entries: StateLike | Iterable[tuple[str, Tensor]],
        vectors: Vectors | None = None,
        scratch: Vectors | None = None,
        greatest: list[Tensor] | None = None,
    ) -> None:
        super().__init__(entries)
        self.vectors = vectors
        self.scratch = scratch
        self.greatest = greatest
        self.laid = [*self.values()]

    @property
    def is_as_laid(self) -> bool:
        """Tell whether no entry was replaced since they were laid end to end."""
        return self.vectors is not None and [*map(id, self.values())] == [*map(id, self.laid)]

    def keep(self, vectors: Vectors) -> None:
        """Keep the vectors that `flatten` gives for the present entries."""
        self.vectors, self.laid, self.greatest = vectors, [*self.values()], None
        if self.scratch is not None:
            self.scratch |= vectors


LIMB_BITS = 32
"""Bits of the lower part of an integer. Sums of both parts are exact for weights of up to 2³¹ in all."""

LOWER = 2**LIMB_BITS - 1
"""Mask of the lower part of an integer."""

MOST_WEIGHT = 2**31

WIDE_INTEGERS = (torch.int32, torch.int64)
"""Types whose weighted sums may not fit into float64, which has 53 bits."""

COMPARED = (torch.float64, torch.int64)
"""Types of which a mean of equal numbers may be another number. Narrower types are rounded back to the number."""


class StateSum:
    """A streamed float64 sum Σ weight · state over states of one layout (same names, shapes and types).

    Integer weights keep the sum exact, hence independent of the order of summation. Sums of integers are exact
    beyond 2⁵³, too. Entries are laid end to end, one vector for each type, so that adding a client takes a few
    operations for any net.

    >>> total = StateSum()
    >>> total.add({"w": torch.tensor([1.0, 2.0])}, 3); total.add({"w": torch.tensor([0.0, 1.0])}, 1)
    >>> total.state(), total.weight
    ({'w': tensor([3., 7.], dtype=torch.float64)}, 4)

    Args:
        after: a finished sum whose memory is reused, unless its entries may still be read: new memory is slow at
            first.

    Attributes:
        flat: by type the float64 sum of the entries, (n,), without those of `WIDE_INTEGERS`.
        whole: by type of `WIDE_INTEGERS` the sums of the upper and of the lower parts, (2, n) int64.
        fractions: by type of `WIDE_INTEGERS` the float64 sum of the entries whose weight is no integer, (n,).
        changed: by type of `COMPARED` which numbers a state of positive weight has other than as it was sent, (n,)
            uint8. Empty where it is not known what was sent.
    """

    def __init__(self, after: "StateSum | None" = None) -> None:
        self.layout: Layout = {}
        self.flat: Vectors = {}
        self.whole: Vectors = {}
        self.fractions: Vectors = {}
        self.changed: Vectors = {}
        self.weight: float | Tensor = 0
        self.is_whole = True
        """Whether all weights are integers."""
        self.compares = False
        """Whether states are compared with what was sent."""
        self._sent: Vectors = {}
        """What was sent of the types of `COMPARED`."""
        self._seen = False
        self._memory: Vectors = {} if after is None or after._seen else after.flat

    @property
    def form(self) -> "SumForm":
        """Describe the sum for the other processes."""
        return SumForm(self.layout, self.weight, self.is_whole, self.compares)

    def weigh(self, weight: float | Tensor, is_whole: bool = True) -> None:
        """Set Σ weight, where the states were added by other processes, and whether all weights are integers."""
        self.weight = weight
        self.is_whole = is_whole
        if not is_whole:
            for dtype, parts in self.whole.items():
                self.fractions.setdefault(dtype, torch.zeros_like(parts[0], dtype=torch.float64))

    def vectors(self) -> list[Tensor]:
        """Give the vectors that are added up over processes, in the same order on all of them."""
        groups = (self.flat, self.whole, self.fractions)
        return [group[dtype] for group in groups for dtype in sorted(group, key=str)]

    def flags(self) -> list[Tensor]:
        """Give the vectors of `changed`, of which the greatest counts over processes."""
        return [self.changed[dtype] for dtype in sorted(self.changed, key=str)]

    def add(self, state: StateLike, weight: float | Tensor = 1, sent: StateLike | None = None) -> None:
        """Add weight · state.

        Args:
            state: tensors by name.
            weight: of the state.
            sent: the entries as the state's owner was sent them, the same for all states. A mean keeps what nobody
                has changed of them; None: it is not known.

        Raises:
            ValueError: if the entries' names or shapes differ from those added before.
        """
        if isinstance(weight, Tensor) and weight.is_floating_point():
            weight = weight.double()  # as the sum, by which it is divided
        self.weight = self.weight + weight
        layout = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
        if first := not self.layout:
            self.layout = layout
        elif [*layout.items()] != [*self.layout.items()]:
            state = arranged(state, layout, self.layout)
        vectors = flatten(state)
        if sent is not None:
            self.compares = True
            self._compare(vectors, weight, sent)
        for dtype, vector in vectors.items():
            if dtype in WIDE_INTEGERS:
                self._add_integers(dtype, vector, weight)
                continue
            if first:
                memory = reusable(self._memory, dtype, [vector])
                self.flat[dtype] = torch.empty_like(vector, dtype=torch.float64) if memory is None else memory
            for total, part in in_pieces(self.flat[dtype], vector):
                if first:
                    total.zero_()
                if isinstance(weight, Tensor):
                    total.add_(torch.where(weight == 0, 0.0, part.to(torch.float64) * weight))
                elif weight:  # zero times infinity is not zero
                    total.add_(part, alpha=weight)

    def _add_integers(self, dtype: torch.dtype, vector: Tensor, weight: float | Tensor) -> None:
        """Add integers, exactly where their weight is an integer."""
        if dtype not in self.whole:
            self.whole[dtype] = torch.zeros(2, len(vector), dtype=torch.int64, device=vector.device)
        integer = as_integer(weight)
        if integer is None:
            self.weigh(self.weight, is_whole=False)
            moved = vector.double() * weight
            if isinstance(weight, Tensor):
                moved = torch.where(weight == 0, 0.0, moved)
            self.fractions[dtype].add_(moved)
            return
        upper, lower = self.whole[dtype]
        wide = vector.to(torch.int64)
        if isinstance(integer, Tensor):
            upper.add_((wide >> LIMB_BITS) * integer)
            lower.add_((wide & LOWER) * integer)
        elif integer:
            upper.add_(wide >> LIMB_BITS, alpha=integer)
            lower.add_(wide & LOWER, alpha=integer)

    def _compare(self, vectors: Vectors, weight: float | Tensor, sent: StateLike) -> None:
        """Find the numbers that are not as they were sent. Zeros are equal whatever their signs."""
        for dtype in COMPARED:
            vector = vectors.get(dtype)
            if vector is None:
                continue
            if dtype not in self._sent:
                entries = {name: sent[name] for name, entry in self.layout.items() if entry[1] == dtype}
                self._sent[dtype] = flatten(entries)[dtype]
                self.changed.setdefault(dtype, torch.zeros_like(vector, dtype=torch.uint8))
            differs = vector != self._sent[dtype]
            if isinstance(weight, Tensor):
                differs &= weight > 0
            if isinstance(weight, Tensor) or weight > 0:
                self.changed[dtype].logical_or_(differs)

    @classmethod
    def zeros(cls, layout: Layout, device: torch.device, *, compares: bool = False) -> "StateSum":
        """Make an empty sum of a known layout, to be added to those of other processes.

        Args:
            layout: of the sum.
            device: of the sum.
            compares: whether the other processes compare states with what was sent.
        """
        total = cls()
        nothing = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in layout.items()}
        total.add(nothing, 0, sent=nothing if compares else None)
        return total

    def state(self) -> State:
        """Give the sum, float64 whatever the entries' types, in the order in which they came."""
        self._seen = True
        integers = {dtype: self.integers(dtype) for dtype in self.whole}
        return dict(unflatten({**self.flat, **integers}, self.layout))

    def integers(self, dtype: torch.dtype) -> Tensor:
        """Give the sum of the integers of a type of `WIDE_INTEGERS`, (n,) float64."""
        upper, lower = self.whole[dtype].double()
        total: Tensor = upper * 2.0**LIMB_BITS + lower
        if dtype in self.fractions:
            total = total + self.fractions[dtype]
        return total


class SumForm(NamedTuple):
    """Describes the sum of one process for the others: layout, weight, and which parts it has."""

    layout: Layout
    weight: float | Tensor
    is_whole: bool
    compares: bool


def as_integer(weight: float | Tensor) -> int | Tensor | None:
    """Give a weight as an integer, None where it is none. That of a floating tensor is not read.

    >>> as_integer(3), as_integer(2.0), as_integer(0.5)
    (3, 2, None)
    """
    if isinstance(weight, Tensor):
        return None if weight.is_floating_point() else weight.to(torch.int64)
    if not 0 <= weight < MOST_WEIGHT or weight != int(weight):
        return None
    return int(weight)


def rounded_quotient(parts: Tensor, divisor: int | Tensor) -> Tensor:
    """Divide sums of the upper and lower parts of integers by an integer > 0, rounded half to even: (2, n) -> (n,).

    >>> rounded_quotient(torch.tensor([[0, 2**30], [7, 0]]), 2)  # 3.5 and 2^61
    tensor([                  4, 2305843009213693952])
    """
    upper, lower = parts
    upper = upper + (lower >> LIMB_BITS)
    lower = lower & LOWER
    quotient = torch.div(upper, divisor, rounding_mode="floor")
    rest = ((upper - quotient * divisor) << LIMB_BITS) + lower
    lower_quotient = torch.div(rest, divisor, rounding_mode="floor")
    remainder = rest - lower_quotient * divisor
    value: Tensor = (quotient << LIMB_BITS) + lower_quotient
    is_half = 2 * remainder == divisor
    goes_up = (2 * remainder > divisor) | (is_half & (value & 1 == 1))
    rounded: Tensor = value + goes_up
    return rounded


def arranged(state: StateLike, layout: Layout, wanted: Layout) -> State:
    """Put the entries of a state, whose layout is given, in the order of another layout.

    Raises:
        ValueError: the layouts differ in more than the order.
    """
    differing = sorted(set(layout.items()) ^ set(wanted.items()), key=str)
    if differing:
        raise ValueError(
            f"states of one sum must have equal names, shapes and types, got {layout.keys()} differing in "
            f"{[entry[0] for entry in differing[:3]]}; give every client the same net"
        )
    return {name: state[name] for name in wanted}


def reusable(memory: Vectors, dtype: torch.dtype, parts: Sequence[Tensor]) -> Tensor | None:
    """Get the vector of a type, where it has the size of these parts together and lies on their device, else None."""
    vector = memory.get(dtype)
    if vector is None or vector.device != parts[0].device or vector.numel() != sum(map(Tensor.numel, parts)):
        return None
    return vector


def in_pieces(*vectors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Cut long vectors of one length on a CPU into pieces that stay in its cache, each a view.

    As a whole float32 is added to float64 through a copy that does not: it takes five times as long.

    >>> [len(a) for a, b in in_pieces(torch.zeros(PIECE + 1), torch.zeros(PIECE + 1))] == [PIECE, 1]
    True
    """
    if vectors[0].device.type != "cpu" or vectors[0].numel() <= PIECE:
        return [vectors]
    return zip(*(torch.split(vector, PIECE) for vector in vectors), strict=True)


def flatten(state: StateLike) -> Vectors:
    """Lay all entries of one type end to end, in order of appearance.

    >>> flatten({"a": torch.ones(2), "n": torch.tensor(3), "b": torch.zeros(1)})
    {torch.float32: tensor([1., 1., 0.]), torch.int64: tensor([3])}
    """
    if isinstance(state, FlatState) and state.vectors is not None and state.is_as_laid:
        return state.vectors
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in state.values():
        data = tensor.detach() if tensor.requires_grad else tensor
        groups.setdefault(tensor.dtype, []).append(data.reshape(-1))
    scratch = state.scratch or {} if isinstance(state, FlatState) else {}
    vectors = {dtype: torch.cat(parts, out=reusable(scratch, dtype, parts)) for dtype, parts in groups.items()}
    if isinstance(state, FlatState):
        state.keep(vectors)
    return vectors


def unflatten(vectors: Vectors, layout: Layout) -> FlatState:
    """Split vectors that `flatten` gave (of whatever type they are now) into views by name.

    >>> unflatten({torch.float32: torch.tensor([1.0, 2.0])}, {"a": (torch.Size([2]), torch.float32)})
    {'a': tensor([1., 2.])}
    """
    entries = []
    ends = dict.fromkeys(vectors, 0)
    for name, (shape, dtype) in layout.items():
        start = ends[dtype]
        ends[dtype] = ends[dtype] + shape.numel()
        entries.append((name, vectors[dtype][start : ends[dtype]].view(shape)))
    return FlatState(entries, vectors)


def flat_rows(stack: StateLike) -> list[FlatState]:
    """Lay the entries of every row of a stack end to end, for all rows at once.

    Args:
        stack: by name (K, ...); copied.

    >>> rows = flat_rows({"a": torch.tensor([[1.0], [2.0]]), "b": torch.tensor([-3.0, 4.0])})
    >>> rows[0], rows[1].vectors, [row.greatest for row in rows]
    ({'a': tensor([1.]), 'b': tensor(-3.)}, {torch.float32: tensor([2., 4.])}, [[tensor(3., dtype=torch.float64)], \
[tensor(4., dtype=torch.float64)]])
    """
    groups: dict[torch.dtype, list[Tensor]] = {}
    for value in stack.values():
        groups.setdefault(value.dtype, []).append(value.detach().flatten(1) if value.ndim > 1 else value.unsqueeze(1))
    flat = {dtype: torch.cat(values, dim=1) for dtype, values in groups.items()}
    vectors = {dtype: whole.unbind() for dtype, whole in flat.items()}
    maxima = [greatest(whole).unbind() for dtype, whole in flat.items() if dtype.is_floating_point and whole.shape[1]]
    parts = {dtype: iter(torch.split(flat[dtype], [v.shape[1] for v in values], 1)) for dtype, values in groups.items()}
    columns = [next(parts[value.dtype]).view(value.shape).unbind() for value in stack.values()]
    return [
        FlatState(
            zip(stack, entries, strict=True),
            {dtype: rows[row] for dtype, rows in vectors.items()},
            greatest=[rows[row] for rows in maxima],
        )
        for row, entries in enumerate(zip(*columns, strict=True))
    ]


def extremes(vectors: Iterable[Tensor]) -> list[Tensor]:
    """Find the least and greatest number of each floating vector (n,), n > 0, 0-d, NaN where one is in it.

    >>> extremes([torch.tensor([1.0, -3.0]), torch.tensor([2]), torch.tensor([torch.nan, 0.0])])
    [tensor(-3.), tensor(1.), tensor(nan), tensor(nan)]
    """
    floating = (vector for vector in vectors if vector.is_floating_point() and vector.numel())
    return [end for vector in floating for end in torch.aminmax(vector)]  # a float64 sum takes twenty times as long


def to_host(values: Sequence[Tensor]) -> list[float]:
    """Read tensors of one element each as numbers, in one transfer for each device of them.

    >>> to_host([torch.tensor(2), torch.tensor(0.5)])
    [2.0, 0.5]
    """
    alike: dict[torch.device, dict[torch.dtype, dict[int, Tensor]]] = {}
    for i, value in enumerate(values):
        group = alike.setdefault(value.device, {}).setdefault(value.dtype, {})
        group[i] = value.reshape(()) if value.ndim else value
    numbers: dict[int, float] = {}
    for groups in alike.values():
        stacked = torch.cat([torch.stack([*group.values()]).double() for group in groups.values()])
        numbers.update(zip(chain(*groups.values()), stacked.tolist(), strict=True))
    return [numbers[i] for i in range(len(values))]


def greatest(rows: Tensor) -> Tensor:
    """Find the greatest magnitude in each floating row, (K, n) -> (K,) float64, n > 0, NaN where one is in it.

    >>> greatest(torch.tensor([[1.0, torch.nan], [2.0, torch.inf], [1.0, -3.0]]))
    tensor([nan, inf, 3.], dtype=torch.float64)
    """
    return torch.maximum(rows.amax(-1), -rows.amin(-1)).double()  # aminmax of rows takes twelve times as long


def weighted_mean(states: Iterable[StateLike], weights: Iterable[float]) -> State:
    """Average states, (Σ n_i s_i) / Σ n_i, in float64 with one division, cast back to each entry's type.

    Integer entries are rounded half to even, boolean entries must be equal.

    >>> weighted_mean([{"w": torch.tensor([0.0])}, {"w": torch.tensor([3.0])}], [1, 2])
    {'w': tensor([2.])}
    """
    total = StateSum()
    for state, weight in zip(states, weights, strict=True):
        total.add(state, weight)
    return mean_of(total)


def choose(condition: Tensor, state: State, otherwise: Mapping[str, Tensor]) -> State:
    """Take `state` where the 0-d `condition` is true, else the entries of `otherwise`, without a transfer to the host.

    >>> choose(torch.tensor(False), {"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])})
    {'w': tensor([2.])}
    """
    return {name: torch.where(condition, tensor, otherwise[name]) for name, tensor in state.items()}


def mean_of(total: StateSum, sent: StateLike | None = None) -> State:
    """Divide a sum by its weight in the entries' own types: integers rounded half to even.

    Args:
        total: the sum.
        sent: the entries that its states were compared with. A number that no state of positive weight has changed
            keeps its bits.

    Raises:
        ValueError: if a boolean entry is not the same everywhere.
    """
    vectors: Vectors = {}
    for dtype in total.whole:
        vectors[dtype] = mean_of_integers(total, dtype)
    for dtype, vector in total.flat.items():
        if dtype == torch.bool:
            vectors[dtype] = common_flags(vector, total)
        else:
            vectors[dtype] = torch.empty_like(vector, dtype=dtype)
            for out, part in in_pieces(vectors[dtype], vector):
                mean = part / total.weight
                out.copy_(mean if dtype.is_floating_point else mean.round_())
    if sent is not None and total.compares:
        keep_unchanged(vectors, total, sent)
    return unflatten(vectors, total.layout)


def keep_unchanged(vectors: Vectors, total: StateSum, sent: StateLike) -> None:
    """Put what no state has changed into the vectors of a mean, in place and bit for bit.

    Numbers of other types than `COMPARED` are equal to it already, except for the sign of a zero.
    """
    for name, mean in unflatten(vectors, total.layout).items():
        if mean.dtype not in COMPARED and mean.is_floating_point():
            mean.copy_(torch.where(mean == sent[name], sent[name], mean))
    for dtype, changed in total.changed.items():
        entries = {name: sent[name] for name, entry in total.layout.items() if entry[1] == dtype}
        vectors[dtype].copy_(torch.where(changed.bool(), vectors[dtype], flatten(entries)[dtype]))


def mean_of_integers(total: StateSum, dtype: torch.dtype) -> Tensor:
    """Divide the sum of the integers of one type by its weight: exactly where all weights are integers."""
    weight = total.weight
    if total.is_whole and isinstance(weight, Tensor):
        return rounded_quotient(total.whole[dtype], weight.to(torch.int64).clamp(min=1)).to(dtype)
    if total.is_whole and weight:
        return rounded_quotient(total.whole[dtype], int(weight)).to(dtype)
    return (total.integers(dtype) / weight).round_().to(dtype)


def common_flags(vector: Tensor, total: StateSum) -> Tensor:
    """Recover boolean entries from their sum, which must be the same everywhere.

    Raises:
        ValueError: naming one that is not.
    """
    mean = (vector / total.weight).nan_to_num_()  # of no weight: nothing differs
    flags = {name: entry for name, entry in total.layout.items() if entry[1] == torch.bool}
    for name, differs in unflatten({torch.bool: mean != (mean > 0.5)}, flags).items():
        if differs.any():
            raise ValueError(
                f"boolean entry {name!r} differs between clients, and only equal ones can be averaged; make it personal"
            )
    return mean > 0.5


EXTRA = "_extra_state"
"""Last part of the name under which a state dict has what a module's `get_extra_state` returns."""


def is_entry(name: str, value: Any) -> bool:
    """Tell whether an entry of a state dict is a parameter or a buffer, not an extra state, which may be a tensor, too.

    >>> is_entry("net.norm.weight", Tensor()), is_entry("net.norm._extra_state", Tensor())
    (True, False)
    """
    return isinstance(value, Tensor) and name.rpartition(".")[2] != EXTRA
