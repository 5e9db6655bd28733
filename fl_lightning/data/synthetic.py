"""The synthetic data of the FedProx paper: 30 clients, each with a softmax model and inputs of its own.

Source: Li et al., MLSys 2020, arXiv:1812.06127, section 5.1, with the sizes of the paper's code.
"""

from typing import NamedTuple

import numpy as np
import torch

from fl_lightning.data.sources import Source
from fl_lightning.data.splits import Array, Split, TensorSplit
from fl_lightning.utils.keyed import keyed_numpy
from fl_lightning.utils.settings import check_at_least, check_whole

NUM_CLIENTS = 30
NUM_FEATURES = 60
NUM_CLASSES = 10
LEAST_SAMPLES = 50
"""The number of samples that every client has besides those that are drawn."""


class SyntheticClient(NamedTuple):
    """Holds the law of one client's samples: x ~ N(mean, Σ), y = argmax softmax(xW + b).

    Args:
        size: Number n of samples.
        weight: W, (60, 10).
        bias: b, (10,).
        mean: Mean v of the inputs, (60,).
    """

    size: int
    weight: Array
    bias: Array
    mean: Array


class Synthetic(Source):
    """Draws the samples of 30 clients: 60 features and 10 classes, with models and inputs that differ by client.

    `data.by: client` with `data.num_clients: null` gives each client its own samples. Client k has these:

    - n = 50 + floor(exp(4 + 2z)) samples with z ~ N(0, 1), a log-normal law. They are as many for all alpha and beta.
    - A model W, b with entries of N(u, 1), where u ~ N(0, alpha²) is drawn once for the client.
    - Inputs x ~ N(v, Σ), where Σ is diagonal with j^-1.2 at feature j = 1 ... 60, and v has entries of N(B, 1), where
      B ~ N(0, beta²) is drawn once for the client.
    - The class argmax softmax(xW + b) of each input.

    The first floor(0.9 n) samples are training samples, the others test samples. All draws depend on `seed`, what is
    drawn, and the client only.

    Args:
        alpha: Standard deviation of u, ≥ 0, by which the models differ. The paper's code reads its N(0, α) in this way.
        beta: Standard deviation of B, ≥ 0, by which the inputs differ.
        iid: Whether all clients have one model with entries of N(0, 1), and inputs with mean 0. Their sizes differ.
        seed: Seed of all draws, which are the same in runs with other seeds.
        limit: The most samples of each split, drawn by class. None: all.

    Raises:
        ValueError: `alpha` or `beta` is below 0, or above 0 beside `iid`.

    Source:
        Li et al., MLSys 2020, arXiv:1812.06127, section 5.1. The paper calls its four sets `iid`, (0, 0), (0.5, 0.5)
        and (1, 1).
    """

    num_classes = NUM_CLASSES
    classes_by = "the law of the synthetic samples"

    def __init__(
        self,
        alpha: float = 0.0,
        beta: float = 0.0,
        iid: bool = False,
        *,
        seed: int = 0,
        limit: int | None = None,
    ) -> None:
        check_at_least(0, "0 draws the models of all clients by one law", alpha=alpha)
        check_at_least(0, "0 draws the inputs of all clients by one law", beta=beta)
        check_whole(seed=seed)
        if iid and (alpha or beta):
            raise ValueError(
                f"data.source.iid gives all clients one law, and alpha and beta make them differ, got alpha={alpha} "
                f"and beta={beta}; leave alpha and beta at 0, or iid out"
            )
        self.alpha = alpha
        self.beta = beta
        self.iid = iid
        self.seed = seed
        self.limit = limit

    def law_of(self, client_id: int) -> SyntheticClient:
        """Draw the law of one client's samples.

        Args:
            client_id: Id of the client, 0 ... 29.
        """
        exponent = 4 + 2 * keyed_numpy(self.seed, "synthetic/size", client_id=client_id).standard_normal()
        size = LEAST_SAMPLES + int(np.exp(exponent))
        # Clients with one model draw it as one client.
        model = keyed_numpy(self.seed, "synthetic/model", client_id=-1 if self.iid else client_id)
        offset = self.alpha * model.standard_normal()
        weight = offset + model.standard_normal((NUM_FEATURES, NUM_CLASSES))
        bias = offset + model.standard_normal(NUM_CLASSES)
        mean = np.zeros(NUM_FEATURES)
        if not self.iid:
            inputs = keyed_numpy(self.seed, "synthetic/mean", client_id=client_id)
            mean = self.beta * inputs.standard_normal() + inputs.standard_normal(NUM_FEATURES)
        return SyntheticClient(size=size, weight=weight, bias=bias, mean=mean)

    def samples_of(self, client_id: int) -> tuple[Array, Array]:
        """Draw the samples of one client.

        Args:
            client_id: Id of the client, 0 ... 29.

        Returns:
            Inputs (n, 60) and classes (n,) int64.
        """
        law = self.law_of(client_id)
        noise = keyed_numpy(self.seed, "synthetic/inputs", client_id=client_id)
        x = law.mean + deviations() * noise.standard_normal((law.size, NUM_FEATURES))
        # The softmax keeps the order of the logits.
        y = np.argmax(x @ law.weight + law.bias, axis=1)
        return x, y

    def load(self) -> tuple[Split, Split]:
        train: list[tuple[Array, Array]] = []
        test: list[tuple[Array, Array]] = []
        for client_id in range(NUM_CLIENTS):
            x, y = self.samples_of(client_id)
            end = len(x) * 9 // 10
            train.append((x[:end], y[:end]))
            test.append((x[end:], y[end:]))
        return joined(train), joined(test)


def deviations() -> Array:
    """Return the standard deviation of each feature, (60,): that of feature j, from 1, is the root of j^-1.2.

    >>> deviations()[:2].round(4).tolist()
    [1.0, 0.6598]
    """
    return np.arange(1, NUM_FEATURES + 1) ** -0.6


def joined(parts: list[tuple[Array, Array]]) -> TensorSplit:
    """Join the samples of all clients, with the column `client` of their ids.

    Args:
        parts: Inputs (n, 60) and classes (n,) of each client.
    """
    x = np.concatenate([inputs for inputs, _ in parts])
    y = np.concatenate([classes for _, classes in parts])
    sizes = [len(classes) for _, classes in parts]
    return TensorSplit(
        x=torch.from_numpy(x).float(),
        y=torch.from_numpy(y),
        columns={"client": np.repeat(np.arange(len(parts)), sizes)},
    )
