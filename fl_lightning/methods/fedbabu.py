"""FedBABU: the body is trained and averaged, under a head that stays as it was drawn until a client is fine-tuned.

Source: Oh et al., ICLR 2022, arXiv:2106.06042. Server: FedAvg of the body.
Note: the accuracy of the model means nothing before fine-tuning, because its head was never trained. Set
`model.evaluate_clients_every` and `model.fine_tuning` (the authors' notebook has 5 epochs), and compare
`local/tuned/KEY`. The authors weigh clients alike: `aggregator.weighting: uniform`.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fl_lightning.client import ClientModule
from fl_lightning.members.weights import matches
from fl_lightning.types import Phase
from fl_lightning.utils.settings import as_list


class FedBABU(ClientModule):
    """Trains the body alone, with the loss as it is. The head gets no gradient, decay or momentum.

    The head is never sent. The statistics of BatchNorm belong to the body. `model.fine_tuning` trains body and head
    before a test, or what its `trains` names, such as `net.head.*`. `local/tuned/KEY` is then the value of the method.
    `local/KEY` and `global/KEY` are of the untrained head, and mean nothing.

    Args:
        head: `fnmatch` patterns of the parameters of the head. A pattern with `!` in front makes an exception. Around a
            module they must be given, such as `module.classifier.*`.
        base: Arguments of `ClientModule`.

    Raises:
        ValueError: The patterns do not divide what is trained into head and body. The error comes when the model is
            built.
    """

    needs_fine_tuning = True
    stackable = True
    sends = frozenset({"weights", "personal means"})

    def __init__(self, head: str | list[str] = "net.head.*", **base: Any) -> None:
        super().__init__(**base)
        self.head = tuple(as_list(head))

    def configure_model(self) -> None:
        super().configure_model()
        self._check_head()

    def _check_head(self) -> None:
        """Refuse patterns that do not divide what is trained into head and body.

        Raises:
            ValueError: A pattern matches no parameter that is trained, nothing is left to train, or a parameter is of
                head and body.
        """
        kind = type(self).__name__
        named = list(self.named_parameters(remove_duplicate=False))
        trained = {name: parameter for name, parameter in named if parameter.requires_grad}
        unknown = [pattern for pattern in self.head if not any_matches(pattern, trained)]
        if unknown or not self.head:
            example = entries_of_last_layer(trained) if trained else "net.head.*"
            given = unknown[0] if unknown else []
            raise ValueError(
                f"{kind}.head must match parameters that are trained, got {given!r}, which matches none of "
                f"{list(trained)[:8]}; name those of the last layers, such as head={example!r}"
            )
        body = {id(parameter): name for name, parameter in trained.items() if not matches(name, self.head)}
        if not body:
            raise ValueError(
                f"{kind}.head must leave parameters to the body, got {list(self.head)}, which match all of "
                f"{list(trained)[:8]}; name fewer, or give the net a hidden layer"
            )
        for name, parameter in trained.items():
            if matches(name, self.head) and id(parameter) in body:
                raise ValueError(
                    f"{kind}.head must have parameters of its own, got {name}, which is {body[id(parameter)]} too; "
                    f"untie them, or name other parameters"
                )

    def is_personal(self, name: str, owner: nn.Module) -> bool:
        is_parameter = name.rpartition(".")[2] in dict(owner.named_parameters(recurse=False))
        return is_parameter and matches(name, self.head)

    def body_names(self) -> tuple[str, ...]:
        """Return the names of the parameters of the body that are trained."""
        return tuple(name for name in self.trained() if not matches(name, self.head))

    def phases(self, exchange: str) -> Iterable[Phase]:
        return (Phase(trains=self.body_names()),)


def entries_of_last_layer(names: Iterable[str]) -> str:
    """Return a pattern of the entries of the layer that has the last one of some entries.

    >>> entries_of_last_layer(["net.body.0.weight", "net.fc.weight", "net.fc.bias"])
    'net.fc.*'
    """
    *_, last = names
    layer, _, _ = last.rpartition(".")
    return f"{layer}.*"


def any_matches(pattern: str, names: Iterable[str]) -> bool:
    """Return True if a pattern, which may have `!` in front, matches one of some names."""
    return any(fnmatchcase(name, pattern.removeprefix("!")) for name in names)
