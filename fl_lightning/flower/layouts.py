"""Layouts of what clients send besides the weights, which most of them decide."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fl_lightning.functional.state import is_entry
from fl_lightning.types import ClientJob, State

MessageLayout = Mapping[str, str]
"""Types and axes by dotted name."""


class Answer(NamedTuple):
    """Answer to a job: a value and the layout of its parts, or what is wrong with it."""

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
        """Yield answers, those of another layout with a ValueError that names the part.

        Of layouts that equally many clients have, the one of the lowest client id counts.
        """
        if exchange not in self._known:
            answers = sorted(answers, key=lambda answer: answer.job.client_id)
            counted = Counter(tuple(sorted(answer.layout.items())) for answer in answers if answer.error is None)
            for layout, _ in counted.most_common(1):
                self._known[exchange] = dict(layout)
        for answer in answers:
            wanted = answer.layout if answer.error is not None else self._known[exchange]
            yield answer._replace(error=answer.error or layout_error(answer.layout, wanted))


def layout_error(layout: MessageLayout, wanted: MessageLayout) -> ValueError | None:
    """Name the first part of a layout that is not as it is wanted.

    None: there is none.
    """
    for path in {**wanted, **layout}:
        if layout.get(path) != wanted.get(path):
            return ValueError(
                f"{path!r} of an answer must be {wanted.get(path, 'absent')}, as most clients sent it first, got "
                f"{layout.get(path, 'nothing')}; send what the method sends"
            )
    return None


def message_layout(parts: Mapping[str, Any], shared: State, exact: bool = False) -> dict[str, str]:
    """Describe what a client sends besides the weights: types and axes by dotted name.

    Args:
        parts: pytrees by name.
        shared: the model's entries: what has the name of one must have its shape.
        exact: the sizes of the axes are part of the layout, not only their number.

    Raises:
        ValueError: naming the part of another shape than its entry.
    """
    layout: dict[str, str] = {}

    def note(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for name, item in value.items():
                note(item, f"{path}.{name}" if path else str(name))
                entry = shared.get(name) if isinstance(name, str) and is_entry(name, item) else None
                if entry is not None and item.shape != entry.shape:
                    raise ValueError(
                        f"{path}.{name} of a result must have the shape {tuple(entry.shape)} of that entry, got "
                        f"{tuple(item.shape)}; send it so"
                    )
        elif isinstance(value, Tensor):
            layout[path] = f"{value.dtype}, " + (f"shape {[*value.shape]}" if exact else f"{value.ndim} axes")
        else:
            layout[path] = type(value).__name__

    note(parts, "")
    return layout
