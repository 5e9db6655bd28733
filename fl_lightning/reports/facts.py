"""Title of a report and the facts below it: what is compared, on which data, with which clients and versions."""

from collections.abc import Callable, Iterable, Sequence

from fl_lightning.federation.values import Settings
from fl_lightning.reports.figures import clients_text
from fl_lightning.reports.results import runs_of
from fl_lightning.reports.saved import TIMES, Group, SavedRun, client_of, read_columns

MOST_NAMED = 5
"""Largest number of methods that a title names."""

SOURCE = "data.source"
PARTITION = "data.partition"
"""Settings of the samples, and of how they are divided among the clients. Arguments have names below them."""

MADE_WITH = ("fl_lightning", "torch")
MACHINE = "machine"
"""Columns of `times.csv` that a page names."""

WITHOUT_MEANING = ("min_samples", "seed")
"""Arguments of partitions that say nothing about how skew the data are."""


def distinct_texts(texts: Iterable[str]) -> list[str]:
    """Return texts that are not empty, each once, in their order."""
    return [text for text in dict.fromkeys(texts) if text]


def joined(texts: Sequence[str], last: str = "and") -> str:
    """Join texts as a sentence does.

    >>> joined(["FedAvg"]), joined(["FedAvg", "FedNTD"]), joined(["0.1", "0.3", "1"], last="or")
    ('FedAvg', 'FedAvg and FedNTD', '0.1, 0.3 or 1')
    """
    *first, end = texts
    return f"{', '.join(first)} {last} {end}" if first else end


def title_of(groups: Sequence[Group]) -> str:
    """Write what is compared, and on which data.

    Args:
        groups: Groups of runs, at least one.
    """
    methods = distinct_texts(group.row for group in groups)
    clients = distinct_texts(client_of(run) for run in runs_of(groups))
    if len(methods) > MOST_NAMED and len(clients) == 1:
        methods = [f"{len(methods)} settings of {clients[0]}"]
    elif len(methods) > MOST_NAMED:
        methods = [*methods[: MOST_NAMED - 2], f"{len(methods) - MOST_NAMED + 2} others"]
    sources = distinct_texts(source_of(run) for run in runs_of(groups))
    title = joined(methods)
    if not sources:
        return title
    if len(sources) > MOST_NAMED:
        return f"{title} on {len(sources)} data sets"
    return f"{title} on {joined(sources)}"


def source_of(run: SavedRun) -> str:
    """Name the data of a run by the class that has them, empty if nothing tells it."""
    for name in (SOURCE, "data"):
        value = run.settings.get(name)
        if isinstance(value, str):
            return value.rpartition(".")[2]
    return ""


def facts_of(groups: Sequence[Group]) -> list[str]:
    """Write short facts about some runs: clients, skew, rounds, seeds, versions and machine, as far as they are known.

    Args:
        groups: Groups of runs, at least one.
    """
    runs = runs_of(groups)
    facts = [
        values_text(runs, num_clients_text),
        partition_text(runs),
        values_text(runs, cohort_text),
        rounds_text(runs),
        seeds_text(runs),
        *made_with(runs),
    ]
    return [fact for fact in facts if fact]


def values_text(runs: Sequence[SavedRun], describe: Callable[[Settings], str]) -> str:
    """Write what some runs have, each description once.

    Args:
        runs: The runs.
        describe: Describes the settings of one run. An empty text says nothing.
    """
    texts = distinct_texts(describe(run.settings) for run in runs)
    return joined(texts, last="or") if texts else ""


def num_clients_text(settings: Settings) -> str:
    """Write the number of clients, empty if it is not known."""
    number = settings.get("data.num_clients")
    return "" if number is None else clients_text(number)


def cohort_text(settings: Settings) -> str:
    """Write how many of the clients train in a round."""
    size = settings.get("data.cohort_size")
    if isinstance(size, int):
        return f"{size} a round"
    share = settings.get("data.participation")
    if isinstance(share, int | float) and share != 1:
        return f"{100 * share:.4g} % of them a round"
    return ""


def partition_text(runs: Sequence[SavedRun]) -> str:
    """Write how the samples are divided among the clients: the class and the values of its arguments."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for run in runs:
        partition = run.settings.get(PARTITION)
        if isinstance(partition, str):
            arguments = found.setdefault(partition.rpartition(".")[2].removesuffix("Partition"), {})
            for name, value in arguments_of(run.settings, PARTITION).items():
                arguments.setdefault(name, {})[value] = None
    texts = []
    for partition, arguments in found.items():
        values = [f"{name}={joined([*known], last='or')}" for name, known in arguments.items()]
        texts.append(f"{partition} ({', '.join(values)})" if values else partition)
    return joined(texts, last="or") if texts else ""


def arguments_of(settings: Settings, setting: str) -> dict[str, str]:
    """Return the arguments of a class among the settings that are no None, as text."""
    arguments: dict[str, str] = {}
    for name, value in settings.items():
        argument = name.removeprefix(f"{setting}.")
        if argument != name and "." not in argument and argument not in WITHOUT_MEANING and value is not None:
            arguments[argument] = str(value)
    return arguments


def rounds_text(runs: Sequence[SavedRun]) -> str:
    """Write the numbers of rounds of some runs."""
    counts = sorted({run.num_rounds for run in runs})
    if len(counts) > MOST_NAMED:
        return f"{counts[0]} to {counts[-1]} rounds"
    if counts == [1]:
        return "1 round"
    return f"{joined([str(count) for count in counts], last='or')} rounds"


def seeds_text(runs: Sequence[SavedRun]) -> str:
    """Write the seeds of some runs, empty if none is known."""
    seeds = distinct_texts(run.seed for run in runs)
    if not seeds:
        return ""
    if len(seeds) > MOST_NAMED:
        return f"{len(seeds)} seeds"
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {joined(seeds)}"


def made_with(runs: Sequence[SavedRun]) -> list[str]:
    """Write the versions and the machines that made some runs, as far as their folders tell."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        columns = read_columns(run.folder / TIMES, [*MADE_WITH, MACHINE])
        for name in (*MADE_WITH, MACHINE):
            for value in columns.get(name, ()):
                found.setdefault(name, {})[str(value)] = None
    facts = [f"{name} {joined([*found[name]], last='or')}" for name in MADE_WITH if name in found]
    if MACHINE in found:
        facts.append(joined([*found[MACHINE]], last="or"))
    return facts
