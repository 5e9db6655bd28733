"""Layouts of the payload besides the weights, which most clients decide."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fl_lightning.functional.state import is_entry
from fl_lightning.types import ClientJob, State

MessageLayout = Mapping[str, str]
"""Types and axes by dotted name."""


class Answer(NamedTuple):
    """Has the answer to a job: a value, or an error.

    Args:
        job: The job.
        value: The answer of the client.
        layout: Types and axes of the parts of the value.
        error: What is wrong with the answer. None: nothing is known to be.
    """

    job: ClientJob
    value: Any = None
    layout: MessageLayout = {}
    error: Exception | None = None


class Layouts:
    """Holds clients to the layout that most of them had first, so that no single one decides what the others may send.

    Until the layout of an exchange is known, all answers are drawn before the first is yielded.
    """

    def __init__(self) -> None:
        self._known: dict[str, MessageLayout] = {}

    def compare(self, exchange: str, answers: Iterable[Answer]) -> Iterator[Answer]:
        """Yield answers. An answer of another layout has a ValueError that names the part.

        If equally many clients have two layouts, the layout of the lowest client id counts.

        Args:
            exchange: Name of the exchange.
            answers: The answers of its clients.
        """
        if exchange not in self._known:
            answers = sorted(answers, key=lambda answer: answer.job.client_id)
            layouts = [answer.layout for answer in answers if answer.error is None]
            if layouts:
                self._known[exchange] = most_common(layouts)
        for answer in answers:
            error = answer.error
            if error is None:
                error = layout_error(answer.layout, self._known[exchange])
            yield answer._replace(error=error)


def most_common(layouts: Iterable[MessageLayout]) -> MessageLayout:
    """Return the layout that most clients have, the first one of several.

    Args:
        layouts: The layouts of the clients, at least one.
    """
    counts = Counter(tuple(sorted(layout.items())) for layout in layouts)
    ((items, _),) = counts.most_common(1)
    return dict(items)


def layout_error(layout: MessageLayout, wanted: MessageLayout) -> ValueError | None:
    """Return an error that names the first part of a layout that is not as it is wanted. None: there is no such part.

    Args:
        layout: The layout of an answer.
        wanted: The layout that it must have.
    """
    for path in {**wanted, **layout}:
        if layout.get(path) != wanted.get(path):
            return ValueError(
                f"{path!r} of an answer must be {wanted.get(path, 'absent')}, as most clients sent it first, got "
                f"{layout.get(path, 'nothing')}; send what the method sends"
            )
    return None


def message_layout(parts: Mapping[str, Any], shared: State, exact: bool = False) -> dict[str, str]:
    """Describe the payload of a client besides the weights: types and axes by dotted name.

    Args:
        parts: Pytrees by name.
        shared: The entries of the model. A part with the name of an entry must have the entry's shape.
        exact: Whether the sizes of the axes are part of the layout, and not only their number.

    Raises:
        ValueError: A part has another shape than the entry of its name.
    """
    layout: dict[str, str] = {}

    def add(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for name, item in value.items():
                own_path = f"{path}.{name}" if path else str(name)
                add(item, own_path)
                if isinstance(name, str) and is_entry(name, item):
                    check_shape(item, shared.get(name), f"{path}.{name}")
        elif isinstance(value, Tensor):
            layout[path] = tensor_layout(value, exact=exact)
        else:
            layout[path] = type(value).__name__

    add(parts, "")
    return layout


def check_shape(value: Tensor, entry: Tensor | None, path: str) -> None:
    """Refuse a part of another shape than the entry of its name.

    Args:
        value: The part.
        entry: The entry of the model. None: the model has no such entry.
        path: Dotted name of the part.

    Raises:
        ValueError: The shape is another one.
    """
    if entry is not None and value.shape != entry.shape:
        raise ValueError(
            f"{path} of a result must have the shape {tuple(entry.shape)} of that entry, got {tuple(value.shape)}; "
            f"send it so"
        )


def tensor_layout(value: Tensor, *, exact: bool) -> str:
    """Describe the type and the axes of a tensor.

    >>> import torch
    >>> tensor_layout(torch.zeros(2, 3), exact=True), tensor_layout(torch.zeros(2, 3), exact=False)
    ('torch.float32, shape [2, 3]', 'torch.float32, 2 axes')
    """
    axes = f"shape {list(value.shape)}" if exact else f"{value.ndim} axes"
    return f"{value.dtype}, {axes}"
