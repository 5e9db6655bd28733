"""The registry of log keys: unit, direction and split of a value, and who may write it. All readers ask it."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal, NamedTuple

from torchmetrics import Metric, MetricCollection

from fl_lightning.metrics.history import (
    BY_CLASS,
    BY_TASK,
    BY_TASK_VALUE,
    EPSILON,
    EPSILON_LOCAL,
    EPSILON_SAMPLES,
    PROMISED,
    plain_key,
)

Direction = Literal["min", "max"]
"""Whether values of a key are better when they are lower or when they are higher."""

Directions = Mapping[str, Direction]
"""Directions by log key, as the user or a metric object gives them."""

Unit = Literal["share", "percent", "bytes", "seconds", "steps", "nats", ""]
"""Unit of the values of a key. A share is in [0, 1]. An empty text means that the unit is not known."""

Split = Literal["test", "val", "train", "clients", ""]
"""The samples that a value is about. `clients` means those of each client. An empty text means not known."""

Writer = Literal["loop", "monitors", "clients"]
"""Who writes a key of the package: the loop, monitors and other callbacks too, or clients too, as terms of losses."""

WRITERS: tuple[Writer, ...] = ("loop", "monitors", "clients")
"""All writers. Each may write its own keys and those of the writers after it."""

LOADER = re.compile(r"/dataloader_idx_\d+")
"""What a key has at its end if there are several dataloaders."""


@dataclass(frozen=True)
class LogKey:
    """Describes one log key.

    Attributes:
        name: The key, without the mark of unprotected values and without the number of a dataloader.
        unit: Unit of the values as far as the key tells.
        direction: Whether lower or higher is better, or None if nobody tells.
        split: The samples that the values are about.
        is_own: Whether the package writes the key. Metrics of the user must not write it.
        writer: Who writes the key, or None for a key of the user.
        has_best: Whether the best value over the rounds says something. Forgetting is 0 before anything was learnt, and
            the average over the tasks that were met is highest when there is one.
        scope: Words for the value and whose it is, which begin a sentence.
    """

    name: str
    unit: Unit
    direction: Direction | None
    split: Split
    is_own: bool
    writer: Writer | None
    has_best: bool
    scope: str


# --- the package's own keys ---


class OwnKey(NamedTuple):
    """Has the unit, the direction and the writer of the package's keys that match a pattern."""

    pattern: str
    unit: Unit
    direction: Direction | None
    writer: Writer = "loop"


TASKS = (
    OwnKey("acc_task/*", "share", "max"),
    OwnKey("acc_tasks", "share", "max"),
    OwnKey("forgetting_tasks", "share", "min"),
    OwnKey("backward_transfer", "share", "max"),
    OwnKey("forward_transfer", "share", "max"),
    OwnKey("learning_accuracy", "share", "max"),
    OwnKey("value_task/*", "", None),
    OwnKey("value_tasks", "", None),
    OwnKey("value_forgetting_tasks", "", "min"),
    OwnKey("value_backward_transfer", "", "max"),
    OwnKey("value_forward_transfer", "", "max"),
    OwnKey("value_learned", "", None),
)
"""Values of the tasks of a scenario, without the beginning of the key. Those of a module that logs no accuracy begin
with `value_`."""

ACC_TASKS = "acc_tasks"
"""Name of the average accuracy over the tasks that were met."""

LEARNING_ACCURACY = "learning_accuracy"
"""Name of the average accuracy on tasks when they are new."""

TASK_MEASURES = (ACC_TASKS, "forgetting_tasks", "backward_transfer", "forward_transfer", LEARNING_ACCURACY)
"""Names of the measures of a table of tasks, without the beginning of the key."""

TASK_VALUE_MEASURES = (
    "value_tasks",
    "value_forgetting_tasks",
    "value_backward_transfer",
    "value_forward_transfer",
    "value_learned",
)
"""Likewise, of a table of other values than accuracies, in the same order."""

EVALUATED = (
    OwnKey("acc", "share", "max"),
    OwnKey("loss", "nats", "min"),
    OwnKey("acc_class/*", "share", "max"),
    OwnKey("forgetting", "share", "min"),
    *TASKS,
)
"""Values of the global model on a split, without the beginning of the key."""

EVALUATIONS = ("global", "val", "test")
"""Beginnings of the keys of an evaluation of the global model."""

WRITTEN_BY_METRICS = (*EVALUATIONS, "local")
"""Beginnings of the keys under which metrics of the user are logged."""

BEGINNINGS = (*WRITTEN_BY_METRICS, "train", "unseen")
"""Beginnings of keys that tell whose values they are."""

WRITTEN_BY_MODULES = ("val", "test")
"""Beginnings of the keys that a module with evaluation steps of its own writes in place of the loop."""

TIME = "time/"
"""Beginning of the log keys of simulated time."""

SECONDS = "time/seconds"
LOST = "time/lost"
STALENESS = "time/staleness"
STALENESS_MAX = "time/staleness_max"
"""Log keys of simulated time: the end of a round since the start of the run, the clients of the round that came to
nothing, and the mean and the largest number of server steps that passed by an update of the round."""

LOSS_TERMS = (
    "aligned",
    "alignment",
    "balanced",
    "ce",
    "contrast",
    "decorr",
    "distance",
    "distillation",
    "dynamic",
    "finetune_ce",
    "generated",
    "ka",
    "kd",
    "lmd",
    "ntd",
    "penalty",
    "personal",
    "proximal",
    "replayed",
    "suppression",
)
"""Names of the terms of local losses that the methods log as `train/NAME`."""

OTHERS = (
    OwnKey("global/train/acc", "share", "max"),
    OwnKey("global/train/loss", "nats", "min"),
    OwnKey("local/alma", "share", "max"),
    OwnKey("local/tuned/alma", "share", "max"),
    OwnKey("unseen/alma", "share", "max"),
    OwnKey("unseen/tuned/alma", "share", "max"),
    OwnKey("local/initial", "share", "max", writer="monitors"),
    OwnKey("local/personalised", "share", "max", writer="monitors"),
    OwnKey("local/train", "share", "max", writer="monitors"),
    OwnKey("local/acc_in_local*", "share", "max", writer="monitors"),
    OwnKey("local/acc_out_local*", "share", "max", writer="monitors"),
    OwnKey("local/forgetting_degree*", "", "min", writer="monitors"),
    OwnKey("local/drift", "", "min", writer="monitors"),
    OwnKey("local/weight_divergence", "", "min", writer="monitors"),
    OwnKey("local/distribution_distance", "", "min", writer="monitors"),
    OwnKey("local/weight_alignment*", "share", "max", writer="monitors"),
    OwnKey("global/weight_alignment*", "share", "max", writer="monitors"),
    OwnKey("local/dead_neurons*", "", "min", writer="monitors"),
    OwnKey("global/hessian/*", "", None, writer="monitors"),
    OwnKey("train/drift_diversity", "", "min", writer="monitors"),
    OwnKey("train/gradient_diversity", "", "min", writer="monitors"),
    OwnKey("train/alpha", "", None, writer="clients"),
    OwnKey("train/cluster/*", "share", None),
    OwnKey("train/cluster_changed", "share", None),
    OwnKey("train/importance", "", None, writer="clients"),
    OwnKey("train/empty_classes", "", None, writer="clients"),
    OwnKey("train/skipped", "", "min"),
    OwnKey("cost/steps", "steps", "min", writer="monitors"),
    OwnKey("cost/seconds", "seconds", "min", writer="monitors"),
    OwnKey("cost/memory", "bytes", "min", writer="monitors"),
    OwnKey("comm/*", "bytes", "min"),
    OwnKey(SECONDS, "seconds", "min"),
    OwnKey(LOST, "", "min"),
    OwnKey(STALENESS, "", "min"),
    OwnKey(STALENESS_MAX, "", "min"),
    OwnKey(EPSILON_SAMPLES, "", "min", writer="clients"),
    OwnKey(EPSILON_LOCAL, "", "min", writer="clients"),
    OwnKey(f"{EPSILON}*", "", "min"),
    OwnKey("privacy/clip", "", None),
    OwnKey("data/class_count", "", None, writer="monitors"),
)

TUNED = "tuned/"
"""Mark of a client's value after fine-tuning, which stands behind the beginning of the key."""

DEVIATION = "/std"
"""End of the key of a deviation, which has the unit of its value. Neither direction of it is better."""

KINDS = (DEVIATION, "/weighted", "/received")
"""Ends of the keys that monitors log beside a value, in its unit."""


def own_keys() -> list[OwnKey]:
    """Return the patterns of all keys that the package writes, with units and directions."""
    keys = []
    for beginning in EVALUATIONS:
        for key in EVALUATED:
            keys.append(OwnKey(f"{beginning}/{key.pattern}", key.unit, key.direction))
            keys.append(OwnKey(f"{beginning}/{key.pattern}_best", key.unit, key.direction))
    for term in LOSS_TERMS:
        keys.append(OwnKey(f"train/{term}", "", "min", writer="clients"))
    for key in TASKS:
        keys.append(OwnKey(f"local/{key.pattern}", key.unit, key.direction))
    return [*keys, *OTHERS]


OWN = own_keys()


@lru_cache(maxsize=4096)
def own_key(name: str) -> OwnKey | None:
    """Return the entry of a key that the package writes, or None for a key of the user."""
    for key in OWN:
        if fnmatchcase(name, key.pattern):
            return key
    for kind in KINDS:
        if name.endswith(kind):
            entry = own_key(name.removesuffix(kind))
            if entry is not None:
                return entry._replace(direction=None if kind == DEVIATION else entry.direction)
    return None


# --- usual names ---


def words_in(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


LOWER = words_in(
    """
    bce bpc bpd brier ce cer cost deviance distance divergence drift ece eer err error errors ergas fdr fid fnr
    forgetting fpr hausdorff hd95 hinge huber intransigence kid kl kld kldiv latency logcosh lpips mae mape mce mer mse
    msle nll penalty perplexity ppl regret rmse rmsle seconds smape smoothl1 wer wmape xent
    """
)
"""Words in keys of values that are better when lower."""

HIGHER = words_in(
    """
    acc accuracy accuracies alma ap auc aupr auprc auroc bleu chrf concordance dice f1 f2 fbeta fscore iou jaccard
    kappa kendall likelihood map matthews mcc meteor miou mrr ndcg pearson pearsons precision psnr r2 recall reward
    rouge sacrebleu sensitivity spearman specificity ssim
    """
)
"""Words in keys of values that are better when higher."""

LOWER_ENDS = ("loss", "losses", "error", "crossentropy", "perplexity")
"""Ends of words of the first kind that are written without a separator, as in `valloss`."""

HIGHER_ENDS = ("acc", "accuracy")
"""Likewise of the second kind."""

TURNED = re.compile(r"(?:in|un|mis|dis|non|anti)-?(?:acc|accuracy|accuracies)\d*")
"""Words that mean the opposite of their end, such as `inacc`."""

ACCURACIES = ("acc", "accuracy", "accuracies")
"""Ends of words in keys of accuracies."""

DECIDES = ("loss", "losses", "error", "cost", "penalty")
"""Ends of the last word that decide if there are words of both kinds, as in `dice_loss`."""

TURNS = words_in(
    """
    activation alpha annealing anti attack attacker attention backdoor bar bars beta bias bound chance change ci
    coef coeff coefficient coefficients coefs complement complementary contribution count cov cv decrease
    degradation delta deviation diff difference discrepancy discriminator disparity dispersion drop entropy epochs
    explained factor factors false feature features gain gamma gap goal half heat improvement inaccuracy increase
    inequality inv inverse iqr lambda leakage limit lost margin membership mia minus neg negative non norm norms not
    num patience per poison poisoned range rank ratio reduction rounds saliency saved saving savings scale scaler
    schedule se sem size sizes skew spread standard std stderr steps target temperature threshold time to tolerance
    trojan true until var variance variation weight weights
    """
)
"""Words that may turn the meaning of another word, such as `loss_weight`. Such a name tells nothing."""

PHRASES: Mapping[tuple[str, ...], Direction] = {
    ("neg", "log", "likelihood"): "min",
    ("negative", "log", "likelihood"): "min",
    ("cross", "entropy"): "min",
    ("intersection", "over", "union"): "max",
    ("dice", "coef"): "max",
    ("dice", "coefficient"): "max",
    ("matthews", "corr", "coef"): "max",
    ("pearson", "corr", "coef"): "max",
    ("spearman", "corr", "coef"): "max",
    ("error", "per", "class"): "min",
    ("per", "class", "error"): "min",
    ("acc", "per", "class"): "max",
    ("accuracy", "per", "class"): "max",
    ("per", "class", "acc"): "max",
    ("per", "class", "accuracy"): "max",
}
"""Words in a row that have a direction together."""

COMPLEMENT = re.compile(r"(?:^|[^A-Za-z0-9])1 ?- ?[A-Za-z]")
"""A complement in a name, such as `1-acc`, which turns the meaning of its word."""

WORD = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+")
"""A word in a name such as `MeanAbsoluteError`."""

SPLITS: Mapping[str, Split] = {
    "global": "test",
    "test": "test",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "train": "train",
    "training": "train",
    "local": "clients",
    "unseen": "clients",
}
"""Splits by words of a key."""


# --- scopes ---

OF_TASKS: Mapping[str, str] = {
    ACC_TASKS: "average accuracy over the tasks that were met (ACC)",
    "forgetting_tasks": "forgetting of tasks, the mean over earlier tasks of best earlier − last accuracy",
    "backward_transfer": "backward transfer (BWT), the mean over tasks that are over of last accuracy − accuracy when "
    "last trained on",
    "forward_transfer": "forward transfer (FWT), the mean over later tasks of accuracy before their stage − before any "
    "training",
    LEARNING_ACCURACY: "learning accuracy (LA), the mean over the tasks that were met of the accuracy when first "
    "trained on",
    "value_tasks": "mean over the tasks that were met of the value by which the module is tested",
    "value_forgetting_tasks": "forgetting of tasks, the mean over earlier tasks of what the value is worse than the "
    "best earlier one",
    "value_backward_transfer": "backward transfer (BWT), the mean over tasks that are over of what the value is better "
    "than when last trained on",
    "value_forward_transfer": "forward transfer (FWT), the mean over later tasks of what the value is better before "
    "their stage than before any training",
    "value_learned": "mean over the tasks that were met of the value by which the module is tested, when first trained "
    "on",
}
"""Measures of a table of tasks in words, by name."""

WITH_TASKS: Mapping[str, str] = {
    "global": "global model on the test split",
    "val": "global model in validation",
    "local": "clients' own models on their own test splits, the mean over the clients",
}
"""Whose tables of tasks there are, by the beginning of the keys."""


def scopes_of_tasks() -> dict[str, str]:
    """Return the measures of all tables of tasks in words, by log key."""
    scopes: dict[str, str] = {}
    for name, measure in OF_TASKS.items():
        for beginning, owner in WITH_TASKS.items():
            scopes[f"{beginning}/{name}"] = f"{measure}: {owner}"
    return scopes


SCOPES: Mapping[str, str] = {
    "global/acc": "accuracy of the global model on the test split",
    "val/acc": "accuracy of the global model in validation",
    "test/acc": "accuracy of the last round's global model on the test split",
    "test/acc_best": "accuracy on the test split of the global model that is best on the validation split",
    "local/alma": "mean over the clients of the accuracy of their own models on their own test splits (ALMA)",
    "local/tuned/alma": "mean over the clients of the accuracy of their models, fine-tuned, on their own test splits",
    "global/forgetting": "forgetting F of the global model on the test split, the mean over classes of best − last "
    "accuracy",
    "val/forgetting": "forgetting F of the global model in validation, the mean over classes of best − last accuracy",
    **scopes_of_tasks(),
}
"""Metric and scope of what is compared unless others are asked for, by log key, in the order of the tables."""

FURTHER: Mapping[str, str] = {
    "global/loss": "loss of the global model on the test split",
    "val/loss": "loss of the global model in validation",
    "cost/steps": "optimizer steps of all clients of a round",
    "cost/seconds": "seconds of a round",
    "cost/memory": "memory at most so far, in bytes",
    "comm/bytes_down": "bytes of a round to the clients",
    "comm/bytes_up": "bytes of a round to the server",
    "comm/bytes_sets": "bytes of the sets that every client receives once",
    SECONDS: "simulated seconds since the start of the run",
    LOST: "clients of a round that came to nothing",
    STALENESS: "server steps that passed by an update, the mean of a round",
    STALENESS_MAX: "server steps that passed by an update, at most in a round",
    "global/train/acc": "accuracy of the global model on the training samples of all clients",
    "global/train/loss": "loss of the global model on the training samples of all clients",
    "unseen/alma": "mean over the clients that never train of the accuracy on their own test splits",
    "unseen/tuned/alma": "mean over the clients that never train of the accuracy, fine-tuned, on their own test splits",
}
"""Likewise, of what has a table only where it is asked for."""

OWNERS: Mapping[Split, str] = {
    "test": "of the global model on the test split",
    "val": "of the global model in validation",
    "train": "of the clients in training",
    "clients": "of the clients, the mean over them",
}
"""Whose values those of other keys are, by the split that the beginning of the key names."""

OWNERS_UNSEEN = "of the clients that never train, the mean over them"
"""Whose values those of the keys that begin with `unseen/` are."""

ON_TRAINING_SAMPLES = "global/train/"
"""Beginning of the keys of the global model on the training samples of all clients."""

LAST = "of the last round's global model on the test split"
"""Whose values those of the keys that begin with `test/` are."""


# --- words ---


@lru_cache(maxsize=4096)
def words_of(name: str) -> tuple[str, ...]:
    """Return the words of all parts of a key, in lower case.

    >>> words_of("val/MeanAbsoluteError"), words_of("val_mIoU"), words_of("R2Score/val")
    (('val', 'mean', 'absolute', 'error'), ('val', 'miou'), ('r2', 'score', 'val'))
    """
    words = list[str]()
    for part in re.split(r"[^A-Za-z0-9]+", name):
        whole = part.lower()
        if whole in LOWER or whole in HIGHER:
            words.append(whole)
        else:
            words += [word.lower() for word in WORD.findall(part)]
    return tuple(words)


def is_known(word: str) -> bool:
    """Return True for a word that has a direction."""
    return word_direction(word) is not None


def word_direction(word: str) -> Direction | None:
    """Return the direction of a word, or None if it has none. Digits at its end may be left out, as in `acc5`."""
    if TURNED.fullmatch(word):
        return None
    for text in (word, word.rstrip("0123456789")):
        if text in LOWER or text.endswith(LOWER_ENDS):
            return "min"
        if text in HIGHER or text.endswith(HIGHER_ENDS):
            return "max"
    return None


@lru_cache(maxsize=4096)
def named_direction(name: str) -> Direction | None:
    """Return the direction that the usual names tell, or None if they tell none or contradict each other.

    >>> [named_direction(name) for name in ("Loss/val", "val_loss_epoch", "mse/val", "val/huber", "val/ppl")]
    ['min', 'min', 'min', 'min', 'min']
    >>> [named_direction(name) for name in ("acc/val", "val_f1", "val/dice_loss", "val/score", "loss_weight")]
    ['max', 'max', 'min', None, None]
    """
    words = words_of(name)
    for phrase, direction in PHRASES.items():
        for start in range(len(words)):
            if words[start : start + len(phrase)] == phrase:
                return direction
    if TURNS.intersection(words) or COMPLEMENT.search(name) or any(TURNED.fullmatch(word) for word in words):
        return None
    told = {part_direction(part) for part in name.split("/") if any(map(is_known, words_of(part)))}
    return told.pop() if len(told) == 1 else None


def part_direction(part: str) -> Direction | None:
    """Return the direction of a part of a key that has words with a direction, or None if they contradict each other.

    The last one decides if it says that the value is a loss, as in `dice_loss`.
    """
    known = [word for word in words_of(part) if is_known(word)]
    directions = {word_direction(word) for word in known}
    if len(directions) == 1:
        return directions.pop()
    return "min" if known[-1].endswith(DECIDES) else None


# --- questions ---


def plain_name(key: str) -> str:
    """Return a key without the mark of unprotected values and without the number of a dataloader.

    >>> plain_name("unprotected/local/alma"), plain_name("val_loss/dataloader_idx_1")
    ('local/alma', 'val_loss')
    """
    return LOADER.sub("", plain_key(key))


def describe(key: str, given: Directions | None = None) -> LogKey:
    """Describe a log key.

    Args:
        key: The log key, which may be marked as unprotected.
        given: Directions that the user or metric objects give. None means none.
    """
    name = plain_name(key)
    entry = own_key(name)
    direction = given_direction(key, given or {})
    unit: Unit = ""
    if entry is not None:
        unit = entry.unit
        direction = direction or entry.direction
    else:
        direction = direction or named_direction(name)
        if names_accuracy(name):
            unit = "share"
    split = split_of(name)
    return LogKey(
        name=name,
        unit=unit,
        direction=direction,
        split=split,
        is_own=entry is not None,
        writer=None if entry is None else entry.writer,
        has_best=words_of(name)[-1:] != ("forgetting",) and not is_measure_of_tasks(name),
        scope=scope_text(name, split),
    )


def tuned_key(key: str) -> str | None:
    """Return the key of the same value after fine-tuning, or None for a key that has no such value.

    >>> tuned_key("local/alma"), tuned_key("unseen/f1"), tuned_key("local/tuned/alma"), tuned_key("global/acc")
    ('local/tuned/alma', 'unseen/tuned/f1', None, None)
    """
    beginning, _, rest = key.partition("/")
    if SPLITS.get(beginning) != "clients" or not rest or rest.startswith(TUNED):
        return None
    return f"{beginning}/{TUNED}{rest}"


def scope_text(name: str, split: Split) -> str:
    """Describe a key at the beginning of a sentence: by its scope, else by its name and whose it is.

    Args:
        name: The plain name of the key.
        split: The split that the name tells.
    """
    scope = SCOPES.get(name) or FURTHER.get(name)
    if scope is not None:
        return f"{scope[0].upper()}{scope[1:]}"
    beginning, _, rest = name.partition("/")
    if not rest or beginning not in BEGINNINGS:
        return name
    if name.startswith(ON_TRAINING_SAMPLES):
        shown = name.removeprefix(ON_TRAINING_SAMPLES).replace("_", " ")
        return f"{shown} of the global model on the training samples of all clients"
    owner = LAST if beginning == "test" else OWNERS[split]
    if beginning == "unseen":
        owner = OWNERS_UNSEEN
    if split == "clients" and rest.startswith(TUNED):
        rest = rest.removeprefix(TUNED)
        owner = f"{owner}, after fine-tuning"
    return f"{rest.replace('_', ' ')} {owner}"


def scope_of(key: str) -> str:
    """Describe a key at the beginning of a sentence: by its scope, else by its name and whose it is.

    >>> scope_of("cost/steps"), scope_of("train/ce"), scope_of("val_f1")
    ('Optimizer steps of all clients of a round', 'ce of the clients in training', 'val_f1')
    >>> scope_of("global/train/val/mse")
    'val/mse of the global model on the training samples of all clients'
    """
    return describe(key).scope


def given_direction(key: str, given: Directions) -> Direction | None:
    """Look up the direction of a key, or of the value that it is a part of: `val/recall` for `val/recall/cat`.

    A value after fine-tuning has the direction of the value before it.

    >>> given_direction("val/recall/cat", {"val/recall": "max"}), given_direction("local/tuned/f", {"local/f": "max"})
    ('max', 'max')
    """
    if not given:
        return None
    plain = {plain_name(name): direction for name, direction in given.items()}
    for name, direction in [*plain.items()]:
        tuned = tuned_key(name)
        if tuned is not None:
            plain.setdefault(tuned, direction)
    name = plain_name(key)
    if name in plain:
        return plain[name]
    if name.endswith(DEVIATION):
        return None
    while "/" in name:
        name = name.rpartition("/")[0]
        if name in plain:
            return plain[name]
    return None


def direction_of(key: str, given: Directions | None = None) -> Direction | None:
    """Return whether values of a key are better when lower (`min`) or higher (`max`), or None if nobody tells.

    >>> direction_of("global/acc"), direction_of("cost/seconds"), direction_of("val/score")
    ('max', 'min', None)
    >>> direction_of("val/score", given={"val/score": "max"})
    'max'
    """
    return describe(key, given).direction


def needed_direction(key: str, given: Directions | None = None) -> Direction:
    """Return the direction of a key of which the best value is asked for.

    Raises:
        ValueError: Nobody tells the direction.
    """
    direction = direction_of(key, given)
    if direction is None:
        raise ValueError(unknown_direction(key))
    return direction


def unknown_direction(key: str) -> str:
    """Return the sentence for a key of which nobody tells the direction."""
    name = plain_name(key)
    return (
        f"--direction must say whether {name} is better when lower or higher, which neither its name nor a metric "
        f"object tells, got none; add --direction {name}=min or --direction {name}=max"
    )


def best_of(values: Iterable[float], direction: Direction) -> float:
    """Return the best of some values. A value that is not finite is never the best one. NaN without a finite value."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return math.nan
    return min(finite) if direction == "min" else max(finite)


def parse_directions(texts: Iterable[str]) -> dict[str, Direction]:
    """Read directions as the command line has them.

    Raises:
        ValueError: A text is not `KEY=min` or `KEY=max`, or two texts contradict each other.

    >>> parse_directions(["val/score=max", "a=min,b=max"])
    {'val/score': 'max', 'a': 'min', 'b': 'max'}
    """
    directions: dict[str, Direction] = {}
    for text in texts:
        for item in text.split(","):
            key, _, word = item.strip().rpartition("=")
            direction: Direction | None = None
            if word == "min":
                direction = "min"
            elif word == "max":
                direction = "max"
            if not key or direction is None:
                raise ValueError(
                    f"--direction must be KEY=min or KEY=max, got {item!r}; write --direction val/score=max"
                )
            if directions.setdefault(key, direction) != direction:
                raise ValueError(f"--direction must name each key once, got {key} as min and as max; leave one out")
    return directions


def metric_direction(metric: Metric) -> Direction | None:
    """Return the direction that a metric object tells, or None if it tells none."""
    higher = metric.higher_is_better
    if higher is None:
        return None
    return "max" if higher else "min"


def metric_directions(metrics: Mapping[str, Metric] | MetricCollection, beginning: str = "") -> dict[str, Direction]:
    """Return the directions that metric objects tell, by log key.

    Args:
        metrics: The metric objects by name.
        beginning: Beginning of the log keys, without a slash. Empty means that the names are the keys.
    """
    directions: dict[str, Direction] = {}
    for name, metric in metrics.items():
        direction = metric_direction(metric)
        if direction is not None:
            directions[f"{beginning}/{name}" if beginning else name] = direction
    return directions


def check_metric_name(name: str) -> None:
    """Refuse a name under which a metric of the user would write a key of the package.

    Raises:
        ValueError: The package writes a key of that name.
    """
    for beginning in WRITTEN_BY_METRICS:
        if own_key(f"{beginning}/{name}") is not None or own_key(f"{beginning}/{name}/NAME") is not None:
            own = own_names(beginning)
            of_model = own[: len(EVALUATED) - len(TASKS)]
            if name in of_model:
                own = of_model
            raise ValueError(f"model.metrics must not be named {', '.join(own)}, got {name!r}; give it another name")


def check_writer(key: str, writer: Writer, *, evaluates: bool = False) -> None:
    """Refuse a log key of the package that somebody else would overwrite, or whose value would be overwritten.

    Args:
        key: The log key.
        writer: Who logs the value.
        evaluates: Whether it is logged by a module of the user that evaluates the global model in place of the loop.

    Raises:
        ValueError: The key belongs to the package.
    """
    name = plain_name(key)
    entry = own_key(name)
    if entry is None or entry.writer in WRITERS[WRITERS.index(writer) :]:
        return
    if evaluates and name.partition("/")[0] in WRITTEN_BY_MODULES:
        return
    raise ValueError(
        f"self.log must not be given {key!r}, which the package writes itself; log the value under another name, "
        f"such as 'my/{name.replace('/', '_')}'"
    )


def own_names(beginning: str) -> list[str]:
    """Return the names of the package's keys with a beginning, each once.

    >>> own_names("val")[:5]
    ['acc', 'loss', 'acc_class', 'forgetting', 'acc_task']
    """
    names: dict[str, None] = {}
    for key in OWN:
        first, _, name = key.pattern.removesuffix("*").removesuffix("/").partition("/")
        if first == beginning and not name.endswith("_best"):
            names[name] = None
    return list(names)


def split_of(name: str) -> Split:
    """Return the split that a key names, or an empty text."""
    if name.startswith(ON_TRAINING_SAMPLES):
        return "train"
    for word in words_of(name):
        if word in SPLITS:
            return SPLITS[word]
    return ""


def names_accuracy(name: str) -> bool:
    """Return True if a key is called an accuracy, and nothing in its name turns the meaning."""
    return named_direction(name) == "max" and any(word_is_accuracy(word) for word in words_of(name))


def word_is_accuracy(word: str) -> bool:
    """Return True for `acc`, `accuracy`, `acc5` and `valacc`."""
    return word.rstrip("0123456789").endswith(ACCURACIES)


NO_ACCURACY = ("alignment", BY_CLASS, BY_TASK, "_transfer")
"""Parts of the package's keys whose values are shares that are no accuracies, or accuracies on a part of a split."""


def is_accuracy(key: str) -> bool:
    """Return True for a key whose values are accuracies, such as `global/acc` or a user's `val_acc`.

    >>> is_accuracy("global/acc"), is_accuracy("acc/val"), is_accuracy("local/alma"), is_accuracy("val_f1")
    (True, True, True, False)
    """
    name = plain_name(key)
    entry = own_key(name)
    if entry is None:
        return names_accuracy(name)
    if any(part in name for part in NO_ACCURACY):
        return False
    return entry.unit == "share" and entry.direction == "max"


def is_of_task(key: str) -> bool:
    """Return True for the key of a value on one task of a scenario.

    >>> is_of_task("global/acc_task/0-1"), is_of_task("local/value_task/0-1"), is_of_task("global/acc_tasks")
    (True, True, False)
    """
    return BY_TASK in key or BY_TASK_VALUE in key


def is_measure_of_tasks(key: str) -> bool:
    """Return True for the key of a measure of a table of tasks.

    >>> is_measure_of_tasks("global/acc_tasks"), is_measure_of_tasks("global/acc_task/0-1")
    (True, False)
    """
    return key.rpartition("/")[2] in (*TASK_MEASURES, *TASK_VALUE_MEASURES)


def is_loss(key: str) -> bool:
    """Return True for a key whose values are losses.

    >>> is_loss("global/loss"), is_loss("val_loss_epoch"), is_loss("train/ce")
    (True, True, False)
    """
    name = plain_name(key)
    if BY_CLASS in name:
        return False
    return named_direction(name) == "min" and any(word.endswith(("loss", "losses")) for word in words_of(name))


def is_value(key: str) -> bool:
    """Return True for a key of the client's own: no bytes, no count of clients, no class, no task, no budget."""
    name = plain_key(key)
    if BY_CLASS in name or is_of_task(name):
        return False
    return not name.startswith(("comm/", PROMISED)) and name != "train/skipped"


def unit_of(key: str, values: Iterable[float] = ()) -> Unit:
    """Return the unit of a key's values.

    The package logs accuracies as shares. A module of the user may log them in percent, under a key of the package
    such as `val/acc` too, which the values tell.

    Args:
        key: The log key.
        values: The values of the key in all runs that are shown together.

    >>> unit_of("val_acc", [0.5, 1.0]), unit_of("val/acc", [12.5, 85.3]), unit_of("val_loss", [2.0])
    ('share', 'percent', '')
    """
    unit = describe(key).unit
    if unit != "share":
        return unit
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    return "percent" if largest > 1 else "share"


def percent_factor(unit: Unit) -> float:
    """Return the factor of a value when it is shown: 100 for a share, which is shown in percent."""
    return 100.0 if unit == "share" else 1.0


def is_in_percent(unit: Unit) -> bool:
    """Return True for a unit that is shown in percent."""
    return unit in ("share", "percent")
