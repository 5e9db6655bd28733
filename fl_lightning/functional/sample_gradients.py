"""Gradients of the single samples of a batch, by `torch.func`."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

from torch import Tensor
from torch.func import grad, vmap

from fl_lightning.functional.state import State
from fl_lightning.utils.batches import batch_length, has_texts, parts_of, some_samples, tensors_of, with_parts


def sample_gradients(
    loss: Callable[[State, Any], Tensor],
    params: State,
    batch: Any,
    *,
    at_once: int,
    randomness: Literal["error", "different"] = "error",
) -> Iterator[State]:
    """Yield the gradients of the samples of a batch, for some samples at a time: by name, (k, ...) each.

    A sample is a batch of one. Its tensors and its texts are its own. Numbers, None and tensors without a dimension are
    those of the batch.

    Args:
        loss: `(params, sample) -> ()`, the loss of a batch of one sample.
        params: Where the gradients are taken, by name.
        batch: The batch: tensors and texts, in mappings, lists, tuples and dataclasses.
        at_once: Number of samples whose gradients are taken together, at least 1.
        randomness: What `vmap` does with random numbers.

    Raises:
        ValueError: The batch has no tensors, or its tensors have not one length.

    >>> import torch
    >>> batch = {"text": ["a", "bb"], "x": torch.tensor([3.0, 5.0])}
    >>> loss = lambda params, sample: params["w"] * sample["x"].sum() * len(sample["text"][0])
    >>> list(sample_gradients(loss, {"w": torch.tensor(1.0)}, batch, at_once=8))
    [{'w': tensor([3.])}, {'w': tensor([10.])}]
    """
    size = batch_length(batch)
    tensors = tensors_of(batch)
    if not tensors and not has_texts(batch):
        raise ValueError(
            f"gradients of single samples need the tensors of a batch, got {type(batch).__name__}, in which none are "
            f"found; return tensors in a tuple, a list, a dictionary or a dataclass in collate_fn"
        )
    for value in tensors:
        if len(value) != size:
            raise ValueError(
                f"the tensors of a batch must have one length for gradients of single samples, got {size} samples and "
                f"a tensor of {len(value)}; give tensors (B, ...) in collate_fn"
            )
    if has_texts(batch):
        # Texts cannot be vectorized.
        for index in range(size):
            sample = some_samples(batch, slice(index, index + 1))
            yield {name: value.unsqueeze(0) for name, value in grad(loss)(params, sample).items()}
        return

    def of_one(state: State, leaves: list[Tensor]) -> Tensor:
        return loss(state, with_tensors(batch, iter([leaf.unsqueeze(0) for leaf in leaves])))

    gradients_of = vmap(grad(of_one), in_dims=(None, 0), randomness=randomness)
    for first in range(0, size, at_once):
        yield gradients_of(params, [value[first : first + at_once] for value in tensors])


def with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a batch like another one, with other tensors in the order of `tensors_of`."""
    if isinstance(value, Tensor):
        return next(tensors) if value.ndim else value
    return with_parts(value, {key: with_tensors(part, tensors) for key, part in parts_of(value).items()})
