"""A paper's table beside ours: published and reached values, their difference, and the claims counted."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from fl_lightning.functional.summary import Interval, speed_up, welch_difference
from fl_lightning.metrics.keys import Direction, direction_of, percent_factor, unknown_direction
from fl_lightning.papers.drawing import (
    Drawing,
    Drawn,
    Series,
    beginning,
    check_target_key,
    counted,
    is_at_end,
    rounds_of,
    unequal_text,
    unique,
)
from fl_lightning.reports.comparison_tables import decimal, difference_text, spread
from fl_lightning.reports.result_tables import Table, TableCell
from fl_lightning.reports.results import HEADINGS, direction_in, mean_of, paired, rounds_until, statistics_of, unit_in
from fl_lightning.reports.saved import SavedRun, Seeds

Published = float | str | None
"""A number, a text such as `78.63 ± 0.42`, or None for a cell that the paper leaves empty."""

NEVER = "never"
"""Published in place of the rounds until a target that is not reached."""


@dataclass
class Measure:
    """Names a value of a run that a paper prints.

    Attributes:
        key: Log key.
        at: Number of rounds after which the value counts. None takes the statistics of the table.
        until: Method whose final value is the target of which the rounds are counted. None counts no rounds.
        speed_up: Whether the rounds of `until` are divided by the rounds until the target.
        targets: Values in the unit of the table, by case, until which the rounds are counted in place of `until`.
        share_of: Method of whose rounds to the same target the rounds are given in percent. None gives the rounds.
    """

    key: str
    at: int | None = None
    until: str | None = None
    speed_up: bool = False
    targets: Mapping[str, float] = field(default_factory=dict)
    share_of: str | None = None

    def __post_init__(self) -> None:
        if (self.until or self.at is not None) and self.targets:
            raise ValueError(f"a measure has one of at, until and targets, and {self.key} has targets and another")
        if (self.speed_up and not self.until) or (self.share_of and not self.targets):
            raise ValueError("speed_up needs until, the method that is sped up, and share_of needs targets")

    @property
    def is_plain(self) -> bool:
        """Whether it is a value at the end, which has several statistics."""
        return self.at is None and not self.counts_rounds

    @property
    def needs_the_end(self) -> bool:
        """Whether the last round of a run decides: of its own run, or of the run that sets the target."""
        return self.at is None and not self.targets

    @property
    def counts_rounds(self) -> bool:
        """Whether the rounds until a target are counted."""
        return bool(self.until or self.targets)


@dataclass
class PaperTable(Drawing):
    """Lists published values beside ours: a row for each measure, case and method.

    Args:
        keys: Measures, or log keys, by their names.
        paper: Published values by measure and method, one for each case, in the unit of the table: shares in percent,
            and `never` for a target that was not reached.
        cases: Cases in the order of the published values. Empty takes the cases of the experiment.
        statistics: Statistics of ours: `final`, `last five` or `best`. The first one is compared.
        baseline: Method that the others are compared with, seed by seed. None compares with none.
        claims: Methods that the paper says are ahead, each with the methods that it says are behind.
        paper_seeds: Number of runs behind a published mean.
        beside: Further log keys, which the table does not show. The csv of its runs keeps their curves.
    """

    keys: Mapping[str, Measure | str]
    paper: Mapping[str, Mapping[str, Sequence[Published]]]
    cases: Sequence[str] = ()
    statistics: Sequence[str] = ("final", "best")
    baseline: str | None = None
    claims: Mapping[str, Sequence[str]] = field(default_factory=dict)
    paper_seeds: int = 3
    beside: Sequence[str] = ()
    shows_missing: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.paper_seeds < 2:
            raise ValueError(f"paper_seeds must be at least 2, for a deviation, got {self.paper_seeds}")
        if not self.statistics:
            raise ValueError(f"statistics must name at least one of {', '.join(HEADINGS)}, got none")
        for statistic in self.statistics:
            if statistic not in HEADINGS:
                raise ValueError(f"statistics must be of {', '.join(HEADINGS)}, got {statistic}")
        for name in self.paper:
            if name not in self.keys:
                raise ValueError(f"paper must hold values of {', '.join(self.keys)}, got {name}")
        for row in self._published_rows():
            for value in row:
                check_published(str(value))

    def _published_rows(self) -> list[Sequence[Published]]:
        """List the published values of each measure and method."""
        rows: list[Sequence[Published]] = []
        for by_method in self.paper.values():
            rows += by_method.values()
        return rows

    def _measures(self) -> list[Measure]:
        """List the measures that are more than a log key."""
        return [measure for measure in self.keys.values() if isinstance(measure, Measure)]

    def of_cases(self, cases: Sequence[str]) -> "PaperTable":
        """Return the table whose published values are those of these cases, unless it has its own.

        Raises:
            ValueError: There are not as many published values as cases, or a target is of none of them.
        """
        table = self if self.cases else replace(self, cases=cases)
        for measure in self._measures():
            for case in measure.targets:
                if case not in table.cases:
                    raise ValueError(f"targets must be of cases of the table ({'; '.join(table.cases)}), got {case!r}")
        for values in self.paper.values():
            for method, row in values.items():
                if len(row) != len(table.cases):
                    raise ValueError(
                        f"paper must hold a value for each of {len(table.cases)} cases, {method} has {len(row)}"
                    )
        return table

    def named_rows(self) -> set[str]:
        """Return the names of the rows with which the table compares others."""
        names = {self.baseline}
        for measure in self._measures():
            names |= {measure.until, measure.share_of}
        for ahead, others in self.claims.items():
            names |= {ahead, *others}
        return {name for name in names if name}

    def log_keys(self) -> list[str]:
        return [measure if isinstance(measure, str) else measure.key for measure in self.keys.values()]

    def target_keys(self) -> list[str]:
        return [measure.key for measure in self._measures() if measure.counts_rounds]

    def draw(self, series: Sequence[Series]) -> Drawn:
        content = TableContent(self, series)
        rows = [content.cells(row) for row in content.rows()]
        return Drawn(Table("", content.header(), rows), " ".join(content.sentences()))


def check_published(text: str) -> None:
    """Refuse a published value that has digits and is no number.

    Raises:
        ValueError: It is neither a number, nor a mean with a deviation, nor a word.
    """
    has_digits = any(letter.isdigit() for letter in text)
    if has_digits and number_in(text) is None:
        raise ValueError(f"a published value must be a number, 'mean ± deviation', or a word, got {text!r}")


class Row(NamedTuple):
    """Names a row of a table.

    Attributes:
        name: Name of the measure.
        case: Name of the case.
        method: Name of the method.
    """

    name: str
    case: str
    method: str


class TableContent:
    """The content of a table: what is published, and what the runs reached.

    Args:
        table: Its settings.
        series: The runs.
    """

    def __init__(self, table: PaperTable, series: Sequence[Series]) -> None:
        self.table = table
        self.series = {(each.case, each.method): each for each in series}
        shown = unique(each.case for each in series)
        self.columns = list(table.cases) or shown
        self.cases = [case for case in self.columns if case in shown]
        methods = [each.method for each in series]
        for values in table.paper.values():
            methods += values
        self.methods = unique(methods)
        self.measures: dict[str, Measure] = {}
        for name, measure in table.keys.items():
            self.measures[name] = Measure(measure) if isinstance(measure, str) else measure
        self.runs: list[SavedRun] = []
        for each in series:
            self.runs += each.group.runs
        self.scales: dict[str, float] = {}
        """Factors of the values in print, by measure: 100 for shares, which are in percent."""
        for name, measure in self.measures.items():
            self.scales[name] = percent_factor(unit_in(self.runs, measure.key))

    # --- directions ---

    def direction(self, name: str) -> Direction:
        """Return whether values of a measure's log key are better when lower or higher.

        Raises:
            ValueError: Nobody tells, or rounds are counted until a value that is better when lower.
        """
        measure = self.measures[name]
        direction = direction_in(self.runs, measure.key) if self.runs else direction_of(measure.key)
        if direction is None:
            raise ValueError(unknown_direction(measure.key))
        if measure.counts_rounds:
            check_target_key(measure.key, direction)
        return direction

    def prefers_low(self, name: str) -> bool:
        """Return True if lower is better in print."""
        measure = self.measures[name]
        if measure.counts_rounds:
            return not measure.speed_up
        return self.direction(name) == "min"

    # --- values ---

    def rows(self) -> list[Row]:
        """List the rows that are published, or that the experiment runs."""
        rows = []
        for name in self.measures:
            for case in self.cases:
                for method in self.methods:
                    row = Row(name, case, method)
                    if self.is_known(row):
                        rows.append(row)
        return rows

    def is_known(self, row: Row) -> bool:
        """Return True for a row that is published, or that the experiment runs."""
        targets = self.measures[row.name].targets
        is_measured = not targets or row.case in targets
        return is_measured and ((row.case, row.method) in self.series or bool(self.published(row)))

    def published(self, row: Row) -> str:
        """Return a published value as text, empty if there is none."""
        values = self.table.paper.get(row.name, {}).get(row.method, ())
        index = self.columns.index(row.case)
        if index >= len(values) or values[index] is None:
            return ""
        return str(values[index])

    def runs_of(self, case: str, method: str) -> Sequence[SavedRun]:
        """Return the runs of a method in a case."""
        series = self.series.get((case, method))
        return [] if series is None else series.group.runs

    def run_of(self, method: str | None, case: str, seeds: Seeds) -> SavedRun | None:
        """Return the run of a method with some seeds, or None if there is none."""
        for run in self.runs_of(case, str(method)):
            if run.seeds == seeds:
                return run
        return None

    def values(self, row: Row, statistic: str) -> dict[Seeds, float]:
        """Return our values by seeds, in the unit of the table. A target that was not reached is infinite.

        If a value is that of the last round, the runs that have most rounds count, and those that stopped early.
        """
        measure = self.measures[row.name]
        if measure.counts_rounds:
            self.direction(row.name)
        series = self.series.get((row.case, row.method))
        values: dict[Seeds, float] = {}
        if series is None:
            return values
        runs = counted(series).group.runs if measure.needs_the_end else series.group.runs
        for run in runs:
            value = self.rounds(row, run) if measure.counts_rounds else self.printed_value(row.name, run, statistic)
            if value is not None:
                values[run.seeds] = value
        return values

    def first_values(self, row: Row) -> dict[Seeds, float]:
        """Return our values of the statistic that is compared, by seeds."""
        return self.values(row, self.table.statistics[0])

    def printed_value(self, name: str, run: SavedRun, statistic: str) -> float | None:
        """Return a value of a run in the unit of the table, or None if it is not known."""
        value = value_at(run, self.measures[name], statistic)
        return None if value is None else self.scales[name] * value

    def rounds(self, row: Row, run: SavedRun) -> float | None:
        """Count the rounds of a run until the target, or relate them to those of another method with the same seeds."""
        measure = self.measures[row.name]
        other = self.run_of(measure.until or measure.share_of, row.case, run.seeds)
        target: float | None = None
        if row.case in measure.targets:
            target = measure.targets[row.case] / self.scales[row.name]
        if measure.until and other:
            target = statistics_of(other, measure.key).get("final")
        if target is None or (measure.share_of and other is None):
            return None
        rounds = rounds_until(run, measure.key, target)
        if measure.share_of and other:
            return share_of_rounds(rounds, rounds_until(other, measure.key, target))
        if rounds is None:
            return -math.inf if measure.speed_up else math.inf
        if measure.speed_up and other:
            return speed_up(rounds, rounds_of(other))
        return rounds

    def at_baseline(self, row: Row, baseline: str) -> dict[Seeds, float]:
        """Return the baseline's values by seeds, at the end of as many rounds as the runs of a method have."""
        is_whole = self.is_whole(row.case, row.method) and self.is_whole(row.case, baseline)
        if is_whole or not self.measures[row.name].is_plain:
            return self.first_values(row._replace(method=baseline))
        values: dict[Seeds, float] = {}
        for run in self.runs_of(row.case, row.method):
            other = self.run_of(baseline, row.case, run.seeds)
            if other is None or rounds_of(other) < rounds_of(run):
                continue
            value = self.printed_value(row.name, beginning(other, rounds_of(run)), self.table.statistics[0])
            if value is not None:
                values[run.seeds] = value
        return values

    # --- whole and open ---

    def is_whole(self, case: str, method: str) -> bool:
        """Return False for the first rounds of longer runs."""
        series = self.series.get((case, method))
        return series is None or series.is_whole

    def is_final(self, row: Row) -> bool:
        """Return False for a value that the rest of the rounds may change."""
        measure = self.measures[row.name]
        if not measure.needs_the_end:
            return True
        return all(self.is_whole(row.case, method) for method in (row.method, measure.until) if method)

    def is_open(self, row: Row, values: Mapping[Seeds, float]) -> bool:
        """Return True if rounds that are left may reach a target that a run of these values has not reached."""
        measure = self.measures[row.name]
        if not measure.counts_rounds:
            return False
        for seeds, value in values.items():
            if not math.isinf(value):
                continue
            for method in (row.method, measure.until or row.method):
                if not self.has_all_rounds(method, row.case, seeds):
                    return True
        return False

    def has_all_rounds(self, method: str, case: str, seeds: Seeds) -> bool:
        """Return False for a run that is not at its end."""
        run = self.run_of(method, case, seeds)
        series = self.series.get((case, method))
        return run is None or series is None or is_at_end(run, series.all_rounds)

    # --- cells ---

    def header(self) -> list[str]:
        """Name the columns. There is but one statistic if no measure is a value at the end."""
        header = ["", "paper"]
        if any(measure.is_plain for measure in self.measures.values()):
            header += [HEADINGS[statistic] for statistic in self.table.statistics]
        else:
            header.append("ours")
        header.append("ours − paper")
        if self.table.baseline:
            header.append(f"ours − {self.table.baseline}")
        return [*header, "seeds × rounds"]

    def cells(self, row: Row) -> list[TableCell]:
        """Write the cells of a row."""
        measure = self.measures[row.name]
        published = self.published(row)
        first = self.first_values(row)
        texts = [self.title_of(row), published or "–", *self.our_texts(row, first)]
        columns_after = 3 if self.table.baseline else 2
        while len(texts) + columns_after < len(self.header()):
            texts.append("–")
        sets_the_target = row.method in (measure.until, measure.share_of)
        comparable = ""
        if self.is_final(row) and not sets_the_target:
            comparable = published
        texts.append(difference_text(self.to_paper(comparable, list(first.values())), decimal))
        if self.table.baseline:
            texts.append(self.difference_to_baseline(row, first, self.table.baseline))
        texts.append(self.text_of_runs(row.case, row.method))
        return [TableCell(text) for text in texts]

    def title_of(self, row: Row) -> str:
        """Name a row, by its measure too if there are several."""
        name = row.name if len(self.measures) > 1 else ""
        return ", ".join(filter(None, (name, row.case, row.method)))

    def our_texts(self, row: Row, first: Mapping[Seeds, float]) -> list[str]:
        """Write our value of each statistic.

        Args:
            row: The row.
            first: The values of the first statistic.
        """
        measure = self.measures[row.name]
        statistics = self.table.statistics if measure.is_plain else self.table.statistics[:1]
        is_open = self.is_open(row, first)
        texts = []
        for statistic in statistics:
            values = list(self.values(row, statistic).values())
            text = spread(values, decimal, counts=measure.counts_rounds)
            texts.append("not yet" if is_open and text == NEVER else text)
        return texts

    def to_paper(self, published: str, ours: Sequence[float]) -> Interval:
        """Subtract the published value from ours."""
        value = number_in(published)
        if value is None or not all(math.isfinite(number) for number in ours):
            return Interval(math.nan, math.nan, math.nan)
        mean, std = value
        return welch_difference(ours, mean, std, count=self.table.paper_seeds)

    def difference_to_baseline(self, row: Row, first: Mapping[Seeds, float], baseline: str) -> str:
        """Write the difference to the baseline, and over how many seeds it is taken if not all count.

        Args:
            row: The row.
            first: Our values of the first statistic.
            baseline: Name of the baseline.
        """
        base = self.at_baseline(row, baseline)
        text = difference_text(paired(first, base, row.method != baseline), decimal)
        known = [seeds for seeds in first if math.isfinite(first[seeds]) and math.isfinite(base.get(seeds, math.inf))]
        if text != "–" and len(known) < len(first):
            return f"{text} ({len(known)} of {len(first)})"
        return text

    def text_of_runs(self, case: str, method: str) -> str:
        """Describe the runs of a row: seeds × rounds, what failed, or that it was not run."""
        series = self.series.get((case, method))
        if series is None or not (series.group.runs or series.failed):
            return "not run"
        counts = Counter(map(rounds_of, series.group.runs))
        whole = "" if series.is_whole else f" of {series.all_rounds}"
        parts = [f"{runs} × {rounds}{whole}" for rounds, runs in sorted(counts.items(), reverse=True)]
        return "; ".join([*parts, *series.failures])

    # --- sentences ---

    def sentences(self) -> list[str]:
        """Describe the columns, and count the claims of which some cells were run."""
        sentences = [
            "Mean ± sample standard deviation over the seeds; shares in percent.",
            "95 % intervals of the differences: Welch's to the paper, Student's among ours, seed by seed.",
        ]
        needs_the_end = any(measure.needs_the_end for measure in self.measures.values())
        unequal = unequal_text(list(self.series.values()))
        if needs_the_end and unequal:
            sentences.append(unequal)
        for method in unique(measure.until for measure in self.measures.values() if measure.until):
            sentences.append(
                f"Rounds are counted until {method}'s final value; its own are those until it has that value first, "
                f"of which papers print all."
            )
        for name, measure in self.measures.items():
            if measure.targets:
                sentences.append(self.sentence_on_targets(name, measure))
        for ahead, others in self.table.claims.items():
            for other in others:
                for name in self.table.paper:
                    sentences += self.sentences_on_claim(name, ahead, other)
        return sentences

    def sentence_on_targets(self, name: str, measure: Measure) -> str:
        """Name the targets of a measure in the cases that are shown."""
        values = [f"{value:g} ({case})" for case, value in measure.targets.items() if case in self.cases]
        share = f", in percent of {measure.share_of}'s with the same seed" if measure.share_of else ""
        return f"{name[:1].upper()}{name[1:]}: rounds until {', '.join(values)}{share}."

    def sentences_on_claim(self, name: str, ahead: str, other: str) -> list[str]:
        """Count in how many cells a method is ahead of another one. What was not run says nothing of a claim.

        Args:
            name: Name of the measure.
            ahead: The method that the paper says is ahead.
            other: The method that the paper says is behind.
        """
        paper = self.leads(Row(name, "", ahead), other, of_paper=True)
        ours = self.leads(Row(name, "", ahead), other, of_paper=False)
        if not ours:
            return []
        measured = f" in {name}" if len(self.measures) > 1 else ""
        here = [leads for case, leads in paper.items() if case in ours]
        these = f" ({sum(here)} of the {len(here)} run here)" if 0 < len(here) < len(paper) else ""
        return [
            f"{ahead} ahead of {other}{measured}: paper {sum(paper.values())} of {len(paper)} cells"
            f"{these}, ours {sum(ours.values())} of {len(ours)}."
        ]

    def leads(self, row: Row, other: str, *, of_paper: bool) -> dict[str, bool]:
        """Return by case whether a method is ahead of another one, for the cases in which both are known.

        Args:
            row: The measure and the method. Its case is not read.
            other: The other method.
            of_paper: Whether the published values are compared, and not ours.
        """
        prefers_low = self.prefers_low(row.name)
        leads = {}
        for case in self.columns:
            here = row._replace(case=case)
            pair = self.published_pair(here, other) if of_paper else self.our_pair(here, other)
            if pair is not None:
                value, other_value = pair
                leads[case] = is_ahead(value, other_value, prefers_low)
        return leads

    def published_pair(self, row: Row, other: str) -> tuple[float, float] | None:
        """Return the published means of a row and of another method, or None if one is unknown."""
        value = self.published_mean(row)
        other_value = self.published_mean(row._replace(method=other))
        if value is None or other_value is None:
            return None
        return value, other_value

    def published_mean(self, row: Row) -> float | None:
        """Return a published mean, or None if it is unknown. A target that was not reached is the worst value."""
        text = self.published(row)
        if text == NEVER:
            return math.inf if self.prefers_low(row.name) else -math.inf
        number = number_in(text)
        return None if number is None else number[0]

    def our_pair(self, row: Row, other: str) -> tuple[float, float] | None:
        """Return our means of a row and of another method over the seeds that both have, or None without such seeds.

        A value that further rounds may change is not known.
        """
        other_row = row._replace(method=other)
        if not self.is_final(row) or not self.is_final(other_row):
            return None
        ours = self.first_values(row)
        theirs = self.first_values(other_row)
        seeds = [seed for seed in ours if seed in theirs]
        if not seeds or self.is_open(row, ours) or self.is_open(other_row, theirs):
            return None
        return mean_of([ours[seed] for seed in seeds]), mean_of([theirs[seed] for seed in seeds])


def share_of_rounds(rounds: int | None, base: int | None) -> float | None:
    """Return rounds in percent of those of another method, or None if the other one does not reach the target."""
    if base is None:
        return None
    if rounds is None:
        return math.inf
    return 100 * rounds / base


def is_ahead(value: float, other: float, prefers_low: bool) -> bool:
    """Return True if a value is better than another one. A value that is not finite is behind every finite one.

    >>> is_ahead(2.0, 1.0, prefers_low=False), is_ahead(2.0, math.nan, prefers_low=True), is_ahead(math.inf, 1.0, False)
    (True, True, False)
    """
    if not math.isfinite(value):
        return False
    if not math.isfinite(other):
        return True
    return value < other if prefers_low else value > other


def value_at(run: SavedRun, measure: Measure, statistic: str) -> float | None:
    """Return a statistic of a run's value, or the value after some rounds. None means that it is not known."""
    if measure.at is None:
        return statistics_of(run, measure.key).get(statistic)
    return run.history.curve(measure.key).get(measure.at - 1)


def number_in(published: str) -> tuple[float, float | None] | None:
    """Read a published mean and its deviation. None means that there is no number.

    >>> number_in("78.63 ± 0.42"), number_in("never"), number_in("")
    ((78.63, 0.42), None, None)
    """
    mean, _, std = published.partition("±")
    try:
        return float(mean), float(std) if std else None
    except ValueError:
        return None
