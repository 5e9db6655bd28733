"""Holds a stream of batches for every metric of the package, and a script that divides it between two processes.

`python streams.py FILE` writes the values of every metric in two processes, of which each gets every other batch.
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.multiprocessing as mp

from fl_lightning import metrics as M

C = 4
N = 5
D = 6
COUNTS = torch.tensor([[0, 1, 40, 9], [10, 10, 10, 10]])


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def answers(seed, size=12, classes=C - 1):
    """Return scores and targets. The last class has no samples."""
    generator = torch.Generator().manual_seed(seed + 100)
    return draw(size, C, seed=seed), torch.randint(classes, (size,), generator=generator)


def of_model():
    found = []
    for seed in range(4):
        preds, target = answers(seed)
        found.append({"preds": preds, "target": target})
    return found


def by_round():
    """Return two batches in each of two rounds."""
    return [{**batch, "round_idx": i // 2} for i, batch in enumerate(of_model())]


def by_client():
    return [{**batch, "client_id": i % 3} for i, batch in enumerate(of_model())]


def of_two_models():
    found = []
    for i, batch in enumerate(of_model()):
        local_preds = draw(12, C, seed=i + 50)
        found.append({"global_preds": batch["preds"], "local_preds": local_preds, "target": batch["target"]})
    return found


def points():
    return [{"value": value, "round_idx": i} for i, value in enumerate([0.1, 0.6, 0.4, 0.7])]


def moves():
    return [{"move": draw(D, seed=seed)} for seed in range(4)]


def states():
    found = []
    for seed in range(4):
        weights = {"a": draw(2, 3, seed=seed)}
        other = {"a": draw(2, 3, seed=seed + 1)}
        found.append({"weights": weights, "other": other})
    return found


def activations():
    found = []
    for i, batch in enumerate(of_model()):
        first = draw(12, D, seed=i).relu()
        second = draw(12, D, seed=i + 10).relu()
        found.append({"first": first, "second": second, "target": batch["target"]})
    return found


def by_stage():
    """Return accuracies before training and after four stages."""
    drawn = draw(5, 3, seed=0).sigmoid()
    trained = [[], [0], [0, 1], [1], [2]]
    return [{"accuracies": drawn[i], "trained": trained[i], "stage": i} for i in range(5)]


def logits():
    return [{"logits": batch["preds"], "target": batch["target"]} for batch in of_model()]


def only_preds():
    return [{"preds": batch["preds"]} for batch in of_model()]


def messages():
    return [{"down": {"w": torch.zeros(i)}, "up": {"w": torch.zeros(2), "norm": 0.5}} for i in range(4)]


STREAMS = {
    "ClasswiseAccuracy": (lambda: M.ClasswiseAccuracy(C), of_model),
    "NormalisedClassAccuracy": (lambda: M.NormalisedClassAccuracy(C), of_model),
    "InLocalAccuracy": (lambda: M.InLocalAccuracy(COUNTS), of_model),
    "OutLocalAccuracy": (lambda: M.OutLocalAccuracy(COUNTS[0]), of_model),
    "DistributionDistance": (lambda: M.DistributionDistance(COUNTS), of_model),
    "ClassGroupAccuracy": (lambda: M.ClassGroupAccuracy(COUNTS[0]), of_model),
    "ClassifierScores": (lambda: M.ClassifierScores(C), logits),
    "Forgetting": (lambda: M.Forgetting(C), by_round),
    "PredictionConsistency": (lambda: M.PredictionConsistency(C), by_round),
    "RoundsToTarget": (lambda: M.RoundsToTarget(0.5), points),
    "SpeedUp": (lambda: M.SpeedUp(0.65, baseline_rounds=8), points),
    "TasksAccuracy": (lambda: M.TasksAccuracy(3), by_stage),
    "TasksForgetting": (lambda: M.TasksForgetting(3), by_stage),
    "BackwardTransfer": (lambda: M.BackwardTransfer(3), by_stage),
    "ForwardTransfer": (lambda: M.ForwardTransfer(3), by_stage),
    "LearningAccuracy": (lambda: M.LearningAccuracy(3), by_stage),
    "Intransigence": (lambda: M.Intransigence(3, reference=[0.9, 0.8, 0.7]), by_stage),
    "ClientAccuracy": (lambda: M.ClientAccuracy(N), by_client),
    "ALMA": (lambda: M.ALMA(N), by_client),
    "InitialAccuracy": (lambda: M.InitialAccuracy(N), by_client),
    "PersonalisedAccuracy": (lambda: M.PersonalisedAccuracy(N), by_client),
    "ClientFairness": (lambda: M.ClientFairness(N), by_client),
    "ForgettingDegree": (lambda: M.ForgettingDegree(C), of_two_models),
    "DriftDiversity": (lambda: M.DriftDiversity(D), moves),
    "GradientDiversity": (lambda: M.GradientDiversity(D), moves),
    "WeightDivergence": (lambda: M.WeightDivergence(order=2), states),
    "WeightAlignment": (lambda: M.WeightAlignment(C, D), activations),
    "EstimatedDistribution": (lambda: M.EstimatedDistribution(C), only_preds),
    "CommunicationCost": (M.CommunicationCost, messages),
}
"""The function that makes each metric, and the function that makes its stream."""


def fed(name, batches=slice(None)):
    """Return a metric after its batches."""
    make, stream = STREAMS[name]
    metric = make()
    for batch in stream()[batches]:
        metric.update(**batch)
    return metric


def plain(value):
    if isinstance(value, dict):
        return {name: each.tolist() for name, each in value.items()}
    return value.tolist()


def process(rank, file, parts):
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}.init", rank=rank, world_size=2)
    found = {}
    for division, slices in parts.items():
        found[division] = {name: plain(fed(name, slices[rank]).compute()) for name in STREAMS}
    torch.distributed.barrier()
    if rank == 0:
        Path(file).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


PARTS = {
    "every other batch": (slice(0, None, 2), slice(1, None, 2)),
    "none for the second": (slice(None), slice(0)),
}
"""The batches of each process, by division."""

if __name__ == "__main__":
    torch.set_num_threads(1)
    mp.spawn(process, (sys.argv[1], PARTS), nprocs=2)
