"""Checks of data that change over the rounds, when a fit begins."""

from itertools import pairwise

import torch
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.utilities import rank_zero_warn

from fl_lightning.client import ClientModule
from fl_lightning.data import FederatedDataModule, Scenario
from fl_lightning.data.changing import belongs
from fl_lightning.federation.checks import measures
from fl_lightning.federation.fresh_values import is_kind
from fl_lightning.federation.pace import Pace
from fl_lightning.federation.parts import FederationParts
from fl_lightning.functional.classes import clean_name

MOST_ROUNDS = 1000
"""Number of rounds whose cohorts are looked at where the rounds of a run are not planned."""

MOST_TIMED_ROUNDS = 1000
"""Largest number of rounds whose times are simulated to see who comes back in them."""

TIMED_ROUNDS = 100
"""Likewise, where the rounds of a run are not planned."""

IN_A_ROW = 10
"""Number of rounds, one after another, each of which begins a stage of a client, that count as every round."""

SETS = ("transfer", "proxy", "shared")
"""Sets besides the clients' own samples."""


def check_changing_data(data: FederatedDataModule, parts: FederationParts, rounds: int | None) -> None:
    """Refuse data that change where something counts on fixed samples, and rounds without clients.

    A warning says if a set that everyone has holds samples of tasks that nobody has met, and if tasks have no values.

    Args:
        data: The data of the run.
        parts: The parts of the federation.
        rounds: The planned rounds. None means no limit.

    Raises:
        ValueError: The run is private, a task is known to a module that cannot know it, tasks have no names of their
            own, or there is such a round.
    """
    num_rounds = MOST_ROUNDS if rounds is None else rounds
    check_somebody_there(data, rounds)
    if data.scenario is None:
        return
    check_names(data.scenario)
    module = parts.client.module
    if data.scenario.knows_task and module is not None:
        raise ValueError(
            f"data.scenario.knows_task chooses among the logits of a net, and a {type(module).__name__} is tested by "
            f"its own steps; give net=, or set knows_task to false"
        )
    if parts.is_private:
        raise ValueError(
            "data.scenario changes which samples a client has, and the guarantees of differential privacy are counted "
            "for fixed ones; leave it out, or train without privacy"
        )
    check_columns(data, data.scenario)
    check_every_round(data, parts.client, num_rounds)
    known = [name for name in SETS if name in parts.needs and holds_later_tasks(data, data.scenario, name)]
    if known:
        rank_zero_warn(
            f"the {known[0]} set has samples of later tasks of data.scenario from the first round on, so that "
            f"{type(parts.client).__name__} knows something of tasks that no client has met; give data.extra_splits."
            f"{known[0]} without them if that must not be"
        )
    if data.scenario.tasks and not measures(parts.client, parts.metrics):
        rank_zero_warn(
            f"nothing is measured on the tasks of data.scenario, because {type(module).__name__} has no "
            f"validation_step and there is no model.metrics; define one for the table of tasks"
        )


def tell_of_early_stopping(data: FederatedDataModule, trainer: Trainer) -> None:
    """Warn if EarlyStopping may end the run before all tasks have come.

    Accuracies fall when a task begins, so that EarlyStopping takes the new task for the end of progress.

    Args:
        data: The data of the run.
        trainer: Has the callbacks.
    """
    if data.scenario is None or not data.scenario.tasks:
        return
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if is_kind(callback, "EarlyStopping"):
            monitor = getattr(callback, "monitor", "its value")
            rank_zero_warn(
                f"EarlyStopping may end the run after a task of data.scenario begins, because {monitor} gets worse "
                f"then; leave it out, or give it a patience of more evaluations than a task has"
            )


def check_names(scenario: Scenario) -> None:
    """Refuse tasks without names of their own, and names that cannot be part of a log key.

    Args:
        scenario: The scenario of the data.

    Raises:
        ValueError: There is such a task.
    """
    names = [task.name for task in scenario.tasks]
    for name in names:
        cleaned = clean_name(name)
        if not cleaned or cleaned != name:
            raise ValueError(
                f"data.scenario must name its tasks by texts without slashes and line breaks, got {name!r}; name it "
                f"such as {cleaned or 'first'!r}"
            )
        if names.count(name) > 1:
            raise ValueError(
                f"data.scenario must have tasks of different names, got {name!r} twice; name each of its tasks"
            )


def check_columns(data: FederatedDataModule, scenario: Scenario) -> None:
    """Refuse tasks if nobody can tell which of the samples that are evaluated belong to them.

    Args:
        data: The data of the run.
        scenario: The scenario of the data.

    Raises:
        ValueError: The samples lack the column of a task, or classes.
    """
    if data.evaluated is None:
        return
    for task in scenario.tasks:
        belongs(data.split(data.evaluated), torch.arange(0), task)


def check_every_round(data: FederatedDataModule, client: ClientModule, num_rounds: int) -> None:
    """Refuse a client that cannot train where data change in every round, if those of a client do.

    Args:
        data: The data of the run.
        client: The client of the run.
        num_rounds: Number of rounds to look at.

    Raises:
        ValueError: The client cannot, and the data of a client do.
    """
    reason = client.why_not_every_round()
    scenario = data.scenario
    if reason is None or scenario is None:
        return
    for client_id in data.training_clients:
        stages = [scenario.stage(client_id, round_idx) for round_idx in range(num_rounds)]
        in_a_row = 0
        for before, after in pairwise(stages):
            in_a_row = in_a_row + 1 if before != after else 0
            if in_a_row >= IN_A_ROW:
                raise ValueError(
                    f"data.scenario changes the data of client {client_id} in every round, and "
                    f"{type(client).__name__} does not go with that: {reason}"
                )


def holds_later_tasks(data: FederatedDataModule, scenario: Scenario, name: str) -> bool:
    """Return True if a set has samples of a task that no client is in when the run begins, as the task sees them.

    Args:
        data: The data of the run.
        scenario: The scenario of the data.
        name: Name of the set.
    """
    begun = {scenario.task(client_id, scenario.stage(client_id, 0)) for client_id in data.training_clients}
    split = data.split(name)
    everything = torch.arange(len(split))
    for number, task in enumerate(scenario.tasks):
        # A set of the user's own need not have the column of the training samples.
        is_known = task.column is None or name not in data.extra_splits
        if number not in begun and task.seen is None and is_known and bool(belongs(split, everything, task).any()):
            return True
    return False


def check_somebody_there(data: FederatedDataModule, rounds: int | None) -> None:
    """Refuse rounds in which no client is there, because all have left or none has joined.

    Args:
        data: The data of the run.
        rounds: The planned rounds. None means no limit.

    Raises:
        ValueError: There is such a round.
    """
    if data.stays is None:
        return
    for round_idx in data.cohort.begins:
        is_planned = rounds is None or round_idx < rounds
        if is_planned and not data.cohort.there(round_idx):
            raise ValueError(
                f"data.stays must leave a client in each round, and in round {round_idx} none is there; let one join "
                f"earlier or leave later{f', or set trainer.max_epochs to {round_idx}' if round_idx else ''}"
            )


# --- rounds in which nobody has samples ---


def check_samples(data: FederatedDataModule, pace: Pace | None, rounds: int | None) -> bool:
    """Refuse rounds in which no client of the cohort has samples, or warn of them if time decides who comes back.

    A client without samples comes back early, so that the rounds of a few clients cannot all have samples.

    Args:
        data: The data of the run.
        pace: Tells who comes back in which round. None: the cohort does.
        rounds: The planned rounds. None means no limit.

    Returns:
        Whether such a round, if one comes, is still to be told of.

    Raises:
        ValueError: There is such a round of a cohort, or nobody that comes back has samples in any round.
    """
    if data.scenario is None:
        return False
    if pace is None or not pace.is_chosen:
        check_rounds(data, MOST_ROUNDS if rounds is None else rounds)
        return rounds is None
    num_rounds = TIMED_ROUNDS if rounds is None else min(rounds, MOST_TIMED_ROUNDS)
    if data.schedule is not None:
        num_rounds = min(num_rounds, len(data.schedule))
    empty = [round_idx for round_idx in range(num_rounds) if comes_back_empty(data, pace, round_idx)]
    if not empty:
        return True
    if len(empty) == num_rounds:
        raise ValueError(
            f"data.scenario must leave clients that come back samples, and in {rounds_text(num_rounds, rounds)} none "
            f"of them has any; change the scenario"
        )
    rank_zero_warn(
        f"no client that comes back has samples in {len(empty)} of {rounds_text(num_rounds, rounds)}, the first of "
        f"which is round {empty[0]}: these rounds leave the model as it is"
    )
    return False


def rounds_text(number: int, rounds: int | None) -> str:
    """Write a number of rounds of a run.

    Args:
        number: The number.
        rounds: The planned rounds. None means no limit.

    >>> rounds_text(20, 20), rounds_text(100, None)
    ('20 rounds', 'the first 100 rounds')
    """
    return f"{number} rounds" if number == rounds else f"the first {number} rounds"


def comes_back_empty(data: FederatedDataModule, pace: Pace, round_idx: int) -> bool:
    """Return True if clients come back in a round, and none of them had samples when it started.

    Args:
        data: The data of the run.
        pace: Tells who comes back in the round.
        round_idx: Index of the round.
    """
    cohort = pace.cohort(round_idx)
    sizes = [data.size(client_id, pace.job(client_id, round_idx).version) for client_id in cohort]
    return bool(cohort) and not any(sizes)


def check_rounds(data: FederatedDataModule, num_rounds: int) -> None:
    """Refuse rounds in which no client of the cohort has samples.

    Args:
        data: The data of the run.
        num_rounds: Number of rounds to look at.

    Raises:
        ValueError: There is such a round.
    """
    if data.schedule is not None:
        num_rounds = min(num_rounds, len(data.schedule))
    empty: list[int] = []
    for round_idx in range(num_rounds):
        cohort = data.cohort(round_idx)
        if cohort and not any(data.size(client_id, round_idx) for client_id in cohort):
            empty.append(round_idx)
    if not empty:
        return
    first = empty[0]
    later = f" and {len(empty) - 1} later ones" if len(empty) > 1 else ""
    leaves_out = len(data.cohort(first)) < len(data.training_clients)
    ask_more = "raise data.participation or data.cohort_size, " if leaves_out else ""
    raise ValueError(
        f"data.scenario must leave some client of each round samples, and in round {first}{later} none of the cohort "
        f"has any; {ask_more}change the scenario, or lower trainer.max_epochs"
    )
