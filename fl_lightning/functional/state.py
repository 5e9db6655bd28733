"""Arithmetic on states (dicts of tensors by name). Every function except `add_` returns new tensors."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

State = dict[str, Tensor]
"""Tensors by name."""

StateLike = Mapping[str, Tensor]
"""Tensors by name, which are only read."""

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
    """Return the inner product Σ a·b over all entries, 0-d in float32 or better, and 0 without entries.

    >>> inner({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 4.0])})
    tensor(11.)
    """
    terms = [(to_float32(tensor) * to_float32(b[name])).sum() for name, tensor in a.items()]
    if not terms:
        return torch.zeros(())
    return torch.stack(terms).sum()


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
    """Return half types as float32, and other types as they are. Sums are never taken in half precision.

    >>> to_float32(torch.ones(1, dtype=torch.bfloat16)).dtype, to_float32(torch.ones(1, dtype=torch.float64)).dtype
    (torch.float32, torch.float64)
    """
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class FlatState(dict[str, Tensor]):
    """Holds a state that is laid end to end at most once, whoever asks, until an entry is replaced.

    No entry may be edited in place meanwhile.

    Args:
        entries: The tensors by name.
        vectors: The result of `flatten`. None means that it is not known.
        scratch: The memory of the vectors by type, which each such state overwrites. None means new memory.
        greatest: The greatest magnitude of the floating entries of each type, 0-d float64. None means that it is not
            known.
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
        self.laid = list(self.values())

    @property
    def is_as_laid(self) -> bool:
        """Whether no entry was replaced since the entries were laid end to end."""
        if self.vectors is None:
            return False
        return list(map(id, self.values())) == list(map(id, self.laid))

    def keep(self, vectors: Vectors) -> None:
        """Keep the vectors that `flatten` gives for the present entries."""
        self.vectors = vectors
        self.laid = list(self.values())
        self.greatest = None
        if self.scratch is not None:
            self.scratch |= vectors


HALF_BITS = 32
"""Bits of the lower part of a wide integer. Sums of both parts are exact for weights of up to 2³¹ in all."""

LOWER = 2**HALF_BITS - 1
"""Mask of the lower part of a wide integer."""

MOST_WEIGHT = 2**31

DIGIT_BITS = 16
"""Bits of a digit of a weight. Digit k of a number counts 2^(16·k), and k may be negative."""

DIGIT = 2**DIGIT_BITS - 1
"""Mask of a digit."""

MOST_ADDED = 2**12
"""Number of states after which the sums of digits are carried. 2¹⁴ products of 48 bits fit into 63 bits."""

WIDE_INTEGERS = (torch.int64, torch.uint64)
"""Integers of two parts of 32 bits. Those of other types are one part."""

BITS_OF = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""The types that hold the bits of unsigned integers, with which torch computes less than with signed ones."""

COMPARED = (torch.float64, torch.int64)
"""Types of which a mean of equal numbers may be another number. Narrower types are rounded back to the number."""

SURE_BITS = 48
"""Bits of a float64 sum of few numbers that are right. The last ones of its 53 bits may not be."""


def is_integer(dtype: torch.dtype) -> bool:
    """Return True for the types whose means are computed exactly.

    >>> is_integer(torch.uint8), is_integer(torch.bool), is_integer(torch.float32)
    (True, False, False)
    """
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


class StateSum:
    """A streamed float64 sum Σ weight · state over states of one layout (same names, shapes and types).

    Integer weights keep the sum exact, hence independent of the order of summation. Sums of integers are exact for
    all weights. Entries are laid end to end, one vector for each type, so that adding a client takes a few
    operations for any net.

    >>> total = StateSum()
    >>> total.add({"w": torch.tensor([1.0, 2.0])}, 3); total.add({"w": torch.tensor([0.0, 1.0])}, 1)
    >>> total.state(), total.weight
    ({'w': tensor([3., 7.], dtype=torch.float64)}, 4)

    Args:
        after: A finished sum whose memory is reused, unless its entries may still be read. New memory is slow at
            first.

    Attributes:
        flat: The float64 sums of the entries that are no integers, (n,), by type.
        whole: The sums of the parts of integers whose weight is an integer, each (n,) int64, by type. The lower part
            is the first one.
        digits: The sums of the integers whose weight is no integer, (n,) int64, by type and digit of the weights.
        both: Whether a boolean entry was true, and whether it was false, in a state of any weight, (2, n) uint8.
        changed: By type of `COMPARED` which numbers a state of positive weight has other than as it was sent, (n,)
            uint8. Empty if it is not known what was sent.
        weight: Σ weight.
        exact_weight: Σ weight as an exact number, over the weights that are on the host or were read.
        unread: Σ weight over the other weights, which are integers on a device.
    """

    def __init__(self, after: "StateSum | None" = None) -> None:
        self.layout: Layout = {}
        self.flat: Vectors = {}
        self.whole: dict[torch.dtype, list[Tensor]] = {}
        self.digits: dict[torch.dtype, dict[int, Tensor]] = {}
        self.both: Vectors = {}
        self.changed: Vectors = {}
        self.weight: float | Tensor = 0
        self.exact_weight: int | Fraction = 0
        self.unread: int | Tensor = 0
        self.compares = False
        """Whether states are compared with what was sent."""
        self._places: set[int] = set()
        """The digits of all weights that are no integers."""
        self._added = 0
        """Number of states since sums of digits were carried."""
        self._sent: Vectors = {}
        """What was sent of the types of `COMPARED`."""
        self._seen = False
        self._memory: Vectors = {}
        if after is not None and not after._seen:
            self._memory = after.flat

    @property
    def is_whole(self) -> bool:
        """Whether all weights are integers, which may be on a device and are not read."""
        return not self._places

    @property
    def form(self) -> "SumForm":
        """Describe the sum for the other processes."""
        return SumForm(
            layout=self.layout,
            weight=self.weight,
            exact_weight=self.exact_weight,
            unread=self.unread,
            places=frozenset(self._places),
            compares=self.compares,
        )

    def take_form(self, form: "SumForm") -> None:
        """Take the form of the sum over all processes, to whose vectors the vectors of this process are added."""
        self.weight = form.weight
        self.exact_weight = form.exact_weight
        self.unread = form.unread
        for dtype in self.whole:
            self._make_digits(dtype, form.places)

    def vectors(self) -> list[Tensor]:
        """Return the vectors that are added up over processes, in the same order on all of them."""
        found: list[Tensor] = []
        found += [self.flat[dtype] for dtype in sorted(self.flat, key=str)]
        for dtype in sorted(self.whole, key=str):
            found += self.whole[dtype]
        for dtype in sorted(self.digits, key=str):
            self._carry(dtype)
            by_place = self.digits[dtype]
            found += [by_place[place] for place in sorted(by_place)]
        return found

    def flags(self) -> list[Tensor]:
        """Return the vectors of which the greatest counts over processes."""
        found: list[Tensor] = []
        for group in (self.both, self.changed):
            found += [group[dtype] for dtype in sorted(group, key=str)]
        return found

    def add(self, state: StateLike, weight: float | Tensor = 1, sent: StateLike | None = None) -> None:
        """Add weight · state.

        Args:
            state: Tensors by name.
            weight: The weight of the state.
            sent: The entries as the state's owner was sent them, the same for all states. A mean keeps what nobody
                has changed of them. None means that it is not known.

        Raises:
            ValueError: The entries' names, shapes or types differ from those added before.
        """
        if isinstance(weight, Tensor) and weight.is_floating_point():
            weight = weight.double()  # As the sum, by which it is divided.
        self.weight = self.weight + weight
        layout = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
        is_first = not self.layout
        if is_first:
            self.layout = layout
        elif list(layout.items()) != list(self.layout.items()):
            state = arranged(state, layout, self.layout)
        vectors = flatten(state)
        if sent is not None:
            self.compares = True
            self._compare(vectors, weight, sent)
        integers: Vectors = {}
        for dtype, vector in vectors.items():
            if is_integer(dtype):
                integers[dtype] = vector
                continue
            if dtype == torch.bool:
                self._add_flags(vector, weight)
            if is_first:
                memory = reusable(self._memory, dtype, [vector])
                self.flat[dtype] = torch.empty_like(vector, dtype=torch.float64) if memory is None else memory
            add_weighted(self.flat[dtype], vector, weight, begins=is_first)
        if integers:
            self._add_integers(integers, weight)

    def _add_flags(self, vector: Tensor, weight: float | Tensor) -> None:
        """Mark which booleans are true and which are false in a state of any weight."""
        both = torch.stack([vector, ~vector])
        both = both & (weight != 0)
        if torch.bool in self.both:
            both = both | self.both[torch.bool].bool()
        self.both[torch.bool] = both.to(torch.uint8)

    def _add_integers(self, vectors: Vectors, weight: float | Tensor) -> None:
        """Add integers exactly."""
        integer = as_integer(weight)
        by_place: dict[int, int] = {}
        if integer is None:
            number = float(weight)  # A weight on a device is read, as only a rule of a user's own makes it.
            if math.isfinite(number):  # The guard refuses others by the sum of weights.
                by_place = digits_of(number)
                self.exact_weight += Fraction(number)
                self._places |= by_place.keys()
            self._added += 1
        elif isinstance(integer, Tensor):
            self.unread = self.unread + integer
        else:
            self.exact_weight += integer
        for dtype, vector in vectors.items():
            parts = parts_of(vector)
            if dtype not in self.whole:
                self.whole[dtype] = [torch.zeros_like(part) for part in parts]
            if integer is None:
                if by_place:
                    self._add_digits(dtype, parts, by_place)
                continue
            for total, part in zip(self.whole[dtype], parts, strict=True):
                if isinstance(integer, Tensor):
                    total.add_(part * integer)
                elif integer:
                    total.add_(part, alpha=integer)

    def _add_digits(self, dtype: torch.dtype, parts: Sequence[Tensor], by_place: Mapping[int, int]) -> None:
        """Add integers of one type, whose weight is given by its digits."""
        self._make_digits(dtype, by_place)
        sums = self.digits[dtype]
        for place, digit in by_place.items():
            for half, part in enumerate(parts):
                sums[place + half * PLACES_OF_HALF].add_(part, alpha=digit)
        if self._added % MOST_ADDED == 0:
            self._carry(dtype)

    def _make_digits(self, dtype: torch.dtype, places: Iterable[int]) -> None:
        """Make the sums of digits, of 0, which weights with such digits need."""
        parts = self.whole[dtype]
        for place in places:
            self._places.add(place)
            sums = self.digits.setdefault(dtype, {})
            for half in range(len(parts)):
                for needed in (place + half * PLACES_OF_HALF, place + half * PLACES_OF_HALF + 1):
                    sums.setdefault(needed, torch.zeros_like(parts[0]))

    def _carry(self, dtype: torch.dtype) -> None:
        """Move what a sum of digits has beyond 16 bits to the next digit. The greatest digit keeps what it gets.

        Afterwards there is a sum for every digit from the least to the greatest.
        """
        sums = self.digits[dtype]
        for place in range(min(sums), max(sums)):
            if place in sums:
                above = sums.setdefault(place + 1, torch.zeros_like(sums[place]))
                above.add_(sums[place] >> DIGIT_BITS)
                sums[place].bitwise_and_(DIGIT)

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
            layout: The layout of the sum.
            device: The device of the sum.
            compares: Whether the other processes compare states with what was sent.
        """
        total = cls()
        nothing = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in layout.items()}
        total.add(nothing, 0, sent=nothing if compares else None)
        return total

    def state(self) -> State:
        """Return the sum, float64 whatever the entries' types, in the order in which they came."""
        self._seen = True
        integers = {dtype: self.integers(dtype) for dtype in self.whole}
        return dict(unflatten({**self.flat, **integers}, self.layout))

    def integers(self, dtype: torch.dtype) -> Tensor:
        """Return the sum of the integers of a type, (n,) float64."""
        total = torch.zeros_like(self.whole[dtype][0], dtype=torch.float64)
        for scale_of_sum, part in self.terms(dtype):
            total += part.double() * float(scale_of_sum)
        return total

    def terms(self, dtype: torch.dtype) -> list[tuple[Fraction, Tensor]]:
        """Return numbers and vectors (n,) int64 whose products add up to the sum of the integers of a type."""
        found: list[tuple[Fraction, Tensor]] = []
        for half, part in enumerate(self.whole[dtype]):
            found.append((Fraction(2) ** (half * HALF_BITS), part))
        for place, part in self.digits.get(dtype, {}).items():
            found.append((Fraction(2) ** (place * DIGIT_BITS), part))
        return found


class SumForm(NamedTuple):
    """Describes the sum of one process for the others: layout, weight, and which parts it has."""

    layout: Layout
    weight: float | Tensor
    exact_weight: int | Fraction
    unread: int | Tensor
    places: frozenset[int]
    compares: bool


PLACES_OF_HALF = HALF_BITS // DIGIT_BITS


def add_weighted(total: Tensor, vector: Tensor, weight: float | Tensor, *, begins: bool) -> None:
    """Add weight · vector to a float64 sum in place, which begins with 0 or goes on. Zero times infinity adds 0."""
    for out, part in in_pieces(total, vector):
        if begins:
            out.zero_()
        if isinstance(weight, Tensor):
            out.add_(torch.where(weight == 0, 0.0, part.to(torch.float64) * weight))
        elif weight:
            out.add_(part, alpha=weight)


def parts_of(vector: Tensor) -> list[Tensor]:
    """Return the parts of integers, each (n,) int64: the lower 32 bits and those above, or the integers themselves.

    >>> parts_of(torch.tensor([2**32 + 7, -1])), parts_of(torch.tensor([5], dtype=torch.uint8))
    ([tensor([         7, 4294967295]), tensor([ 1, -1])], [tensor([5])])
    """
    if vector.dtype not in WIDE_INTEGERS:
        return [vector.to(torch.int64)]
    wide = vector.view(torch.int64)
    upper = wide >> HALF_BITS
    if vector.dtype == torch.uint64:
        upper = upper & LOWER
    return [wide & LOWER, upper]


def digits_of(weight: float) -> dict[int, int]:
    """Return the digits of a finite number that are not 0: digit k counts 2^(16·k).

    >>> digits_of(0.5), digits_of(65537.0), digits_of(-2.0**-16)
    ({-1: 32768}, {0: 1, 1: 1}, {-1: -1})
    """
    numerator, denominator = weight.as_integer_ratio()
    exponent = 1 - denominator.bit_length()  # The denominator is a power of 2.
    place, shift = divmod(exponent, DIGIT_BITS)
    sign = -1 if numerator < 0 else 1
    remaining = abs(numerator) << shift
    digits: dict[int, int] = {}
    while remaining:
        digit = remaining & DIGIT
        if digit:
            digits[place] = sign * digit
        remaining >>= DIGIT_BITS
        place += 1
    return digits


def as_integer(weight: float | Tensor) -> int | Tensor | None:
    """Return a weight as an integer, or None if it is none. A floating tensor is not read.

    >>> as_integer(3), as_integer(2.0), as_integer(0.5)
    (3, 2, None)
    """
    if isinstance(weight, Tensor):
        return None if weight.is_floating_point() else weight.to(torch.int64)
    if not 0 <= weight < MOST_WEIGHT or weight != int(weight):
        return None
    return int(weight)


def rounded_quotient(parts: Sequence[Tensor], divisor: int | Tensor) -> Tensor:
    """Divide sums of the parts of integers, each (n,), by an integer > 0, rounded half to even: (n,).

    >>> rounded_quotient([torch.tensor([7, 0]), torch.tensor([0, 2**30])], 2)  # 3.5 and 2^61
    tensor([                  4, 2305843009213693952])
    """
    lower, *uppers = parts
    value = torch.zeros_like(lower)
    for upper in uppers:
        high = upper + (lower >> HALF_BITS)
        lower = lower & LOWER
        quotient = torch.div(high, divisor, rounding_mode="floor")
        lower = ((high - quotient * divisor) << HALF_BITS) + lower
        value = quotient << HALF_BITS
    quotient = torch.div(lower, divisor, rounding_mode="floor")
    remainder = lower - quotient * divisor
    value = value + quotient
    is_half = 2 * remainder == divisor
    goes_up = (2 * remainder > divisor) | (is_half & (value & 1 == 1))
    rounded: Tensor = value + goes_up
    return rounded


def arranged(state: StateLike, layout: Layout, wanted: Layout) -> State:
    """Return a state with its entries in the order of another layout.

    Args:
        state: The state.
        layout: The layout of the state.
        wanted: The layout with the order.

    Raises:
        ValueError: The layouts differ in more than the order.
    """
    differing = sorted(set(layout.items()) ^ set(wanted.items()), key=str)
    if differing:
        raise ValueError(
            f"states of one sum must have equal names, shapes and types, got {layout.keys()} differing in "
            f"{[entry[0] for entry in differing[:3]]}; give every client the same net"
        )
    return {name: state[name] for name in wanted}


def reusable(memory: Vectors, dtype: torch.dtype, parts: Sequence[Tensor]) -> Tensor | None:
    """Return the vector of a type if it has the size of these parts together and is on their device, else None."""
    vector = memory.get(dtype)
    if vector is None or vector.device != parts[0].device:
        return None
    if vector.numel() != sum(map(Tensor.numel, parts)):
        return None
    return vector


def in_pieces(*vectors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Cut long vectors of one length on a CPU into views that stay in its cache.

    A whole vector of float32 is added to float64 through a copy that does not stay there.

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
    scratch: Vectors = {}
    if isinstance(state, FlatState) and state.scratch is not None:
        scratch = state.scratch
    vectors: Vectors = {}
    for dtype, parts in groups.items():
        vectors[dtype] = torch.cat(parts, out=reusable(scratch, dtype, parts))
    if isinstance(state, FlatState):
        state.keep(vectors)
    return vectors


def unflatten(vectors: Vectors, layout: Layout) -> FlatState:
    """Split vectors of `flatten`, whose types may have changed, into views by name.

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
        stack: The entries of all rows by name, (K, ...), which are copied.

    >>> rows = flat_rows({"a": torch.tensor([[1.0], [2.0]]), "b": torch.tensor([-3.0, 4.0])})
    >>> rows[0], rows[1].vectors, [row.greatest for row in rows]
    ({'a': tensor([1.]), 'b': tensor(-3.)}, {torch.float32: tensor([2., 4.])}, [[tensor(3., dtype=torch.float64)], \
[tensor(4., dtype=torch.float64)]])
    """
    groups: dict[torch.dtype, list[Tensor]] = {}
    for value in stack.values():
        flat_value = value.detach().flatten(1) if value.ndim > 1 else value.unsqueeze(1)
        groups.setdefault(value.dtype, []).append(flat_value)
    vectors: dict[torch.dtype, Sequence[Tensor]] = {}
    parts: dict[torch.dtype, Iterator[Tensor]] = {}
    maxima: list[Sequence[Tensor]] = []
    for dtype, values in groups.items():
        whole = torch.cat(values, dim=1)
        vectors[dtype] = whole.unbind()
        parts[dtype] = iter(torch.split(whole, [value.shape[1] for value in values], 1))
        if dtype.is_floating_point and whole.shape[1]:
            maxima.append(greatest(whole).unbind())
    columns = [next(parts[value.dtype]).view(value.shape).unbind() for value in stack.values()]
    rows: list[FlatState] = []
    for row, entries in enumerate(zip(*columns, strict=True)):
        rows.append(
            FlatState(
                entries=zip(stack, entries, strict=True),
                vectors={dtype: of_rows[row] for dtype, of_rows in vectors.items()},
                greatest=[of_rows[row] for of_rows in maxima],
            )
        )
    return rows


def extremes(vectors: Iterable[Tensor]) -> list[Tensor]:
    """Return the least and greatest number of each floating vector (n,), n > 0, 0-d. They are NaN if one number is.

    >>> extremes([torch.tensor([1.0, -3.0]), torch.tensor([2]), torch.tensor([torch.nan, 0.0])])
    [tensor(-3.), tensor(1.), tensor(nan), tensor(nan)]
    """
    ends: list[Tensor] = []
    for vector in vectors:
        if vector.is_floating_point() and vector.numel():
            ends += torch.aminmax(vector)
    return ends


def to_host(values: Sequence[Tensor]) -> list[float]:
    """Return tensors of one element each as numbers, with one transfer for each of their devices.

    >>> to_host([torch.tensor(2), torch.tensor(0.5)])
    [2.0, 0.5]
    """
    alike: dict[torch.device, dict[torch.dtype, dict[int, Tensor]]] = {}
    for index, value in enumerate(values):
        group = alike.setdefault(value.device, {}).setdefault(value.dtype, {})
        group[index] = value.reshape(()) if value.ndim else value
    numbers: dict[int, float] = {}
    for groups in alike.values():
        stacked = torch.cat([torch.stack(list(group.values())).double() for group in groups.values()])
        numbers.update(zip(chain(*groups.values()), stacked.tolist(), strict=True))
    return [numbers[index] for index in range(len(values))]


def greatest(rows: Tensor) -> Tensor:
    """Return the greatest magnitude in each floating row, (K, n) -> (K,) float64, n > 0. It is NaN if one number is.

    >>> greatest(torch.tensor([[1.0, torch.nan], [2.0, torch.inf], [1.0, -3.0]]))
    tensor([nan, inf, 3.], dtype=torch.float64)
    """
    # aminmax of rows takes much longer.
    return torch.maximum(rows.amax(-1), -rows.amin(-1)).double()


def weighted_mean(states: Iterable[StateLike], weights: Iterable[float]) -> State:
    """Return the mean of states, (Σ n_i s_i) / Σ n_i, in float64 with one division, cast to each entry's type.

    Integer entries are exact and rounded half to even. Boolean entries must be equal.

    >>> weighted_mean([{"w": torch.tensor([0.0])}, {"w": torch.tensor([3.0])}], [1, 2])
    {'w': tensor([2.])}
    """
    total = StateSum()
    for state, weight in zip(states, weights, strict=True):
        total.add(state, weight)
    return mean_of(total)


def choose(condition: Tensor, state: State, otherwise: Mapping[str, Tensor]) -> State:
    """Return `state` if the 0-d `condition` is true, else the entries of `otherwise`, without a transfer to the host.

    >>> choose(torch.tensor(False), {"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])})
    {'w': tensor([2.])}
    """
    chosen: State = {}
    for name, tensor in state.items():
        other = otherwise[name]
        bits = BITS_OF.get(tensor.dtype)
        if bits is None:
            chosen[name] = torch.where(condition, tensor, other)
        else:  # Torch 2.9 cannot choose between such integers themselves.
            chosen[name] = torch.where(condition, tensor.view(bits), other.view(bits)).view(tensor.dtype)
    return chosen


def mean_of(total: StateSum, sent: StateLike | None = None) -> State:
    """Divide a sum by its weight, in the entries' own types. Integers are rounded half to even.

    Args:
        total: The sum.
        sent: The entries that the states of the sum were compared with. A number that no state of positive weight has
            changed keeps its bits. None means that they were not compared.

    Raises:
        ValueError: A boolean entry is not the same everywhere.
    """
    vectors: Vectors = {}
    for dtype in total.whole:
        vectors[dtype] = mean_of_integers(total, dtype)
    for dtype, vector in total.flat.items():
        if dtype == torch.bool:
            vectors[dtype] = common_flags(total)
        else:
            vectors[dtype] = torch.empty_like(vector, dtype=dtype)
            for out, part in in_pieces(vectors[dtype], vector):
                mean = part / total.weight
                out.copy_(mean)
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
    """Divide the sum of the integers of one type by its weight, exactly, rounded half to even."""
    weight = total.weight
    if total.is_whole and isinstance(weight, Tensor):
        rounded = rounded_quotient(total.whole[dtype], weight.to(torch.int64).clamp(min=1))
    elif total.is_whole:
        rounded = rounded_quotient(total.whole[dtype], int(exact_weight_of(total)))
    else:
        rounded = rounded_fraction(total.terms(dtype), exact_weight_of(total))
    return rounded.view(dtype) if dtype in WIDE_INTEGERS else rounded.to(dtype)


def exact_weight_of(total: StateSum) -> Fraction:
    """Return the finite weights of a sum as an exact number, or 1 for a sum of no weight, which is 0."""
    weight = Fraction(total.exact_weight + int(total.unread))
    return weight or Fraction(1)


def rounded_fraction(terms: Sequence[tuple[Fraction, Tensor]], divisor: Fraction) -> Tensor:
    """Divide a sum of products by a number, exactly, rounded half to even.

    Numbers of which float64 does not tell how they are rounded are divided one by one.

    Args:
        terms: Factors, and vectors (n,) int64, of the sum of products.
        divisor: The number, not 0.

    Returns:
        (n,) int64, modulo 2⁶⁴.

    >>> rounded_fraction([(Fraction(1, 2), torch.tensor([1, 3, 2**62 + 1]))], Fraction(1))
    tensor([                  0,                   2, 2305843009213693952])
    """
    _, first = terms[0]
    estimate = torch.zeros_like(first, dtype=torch.float64)
    error = torch.zeros_like(estimate)
    for factor, vector in terms:
        term = vector.double() * float(factor / divisor)
        estimate += term
        error += term.abs() * 2.0**-SURE_BITS
    rounded = estimate.round()
    is_sure = ((estimate - rounded).abs() + error < 0.5) & (error < 0.25)
    result = torch.where(is_sure, rounded, 0.0).to(torch.int64)
    positions = (~is_sure).nonzero().flatten()
    if not len(positions):
        return result
    columns = [vector[positions].tolist() for _, vector in terms]
    exact: list[int] = []
    for numbers in zip(*columns, strict=True):
        value = Fraction(0)
        for (factor, _), number in zip(terms, numbers, strict=True):
            value += factor * number
        exact.append(as_int64(round(value / divisor)))
    result[positions] = torch.tensor(exact, device=result.device)
    return result


def as_int64(number: int) -> int:
    """Return the int64 that is equal to an integer modulo 2⁶⁴.

    >>> as_int64(2**63) == -(2**63), as_int64(-5)
    (True, -5)
    """
    return (number + 2**63) % 2**64 - 2**63


def common_flags(total: StateSum) -> Tensor:
    """Return boolean entries, which must be the same everywhere, and are false in a sum of no weight.

    Raises:
        ValueError: An entry is not the same everywhere.
    """
    is_true: Tensor
    is_true, is_false = total.both[torch.bool].bool()
    flags = {name: entry for name, entry in total.layout.items() if entry[1] == torch.bool}
    for name, differs in unflatten({torch.bool: is_true & is_false}, flags).items():
        if differs.any():
            raise ValueError(
                f"boolean entry {name!r} differs between clients, and only equal ones can be averaged; make it personal"
            )
    return is_true


EXTRA = "_extra_state"
"""Last part of the name of what a module's `get_extra_state` returns, in a state dict."""


def is_entry(name: str, value: Any) -> bool:
    """Return True for a parameter or buffer of a state dict, not for an extra state, which may be a tensor too.

    >>> is_entry("net.norm.weight", Tensor()), is_entry("net.norm._extra_state", Tensor()), is_entry("net.step", 3)
    (True, False, False)
    """
    return isinstance(value, Tensor) and name.rpartition(".")[2] != EXTRA
