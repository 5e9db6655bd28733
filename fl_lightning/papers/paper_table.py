"""A paper's table beside ours: published and reached values, their difference, and the claims counted."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from fl_lightning.functional.summary import Interval, speed_up, welch_difference
from fl_lightning.metrics.keys import Direction, direction_of, percent_factor, unknown_direction
from fl_lightning.papers.drawing import Drawing, Drawn, Series, beginning, check_target_key, rounds_of, unique
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
        key: log key.
        at: rounds after which the value counts; None: the statistics of the table.
        until: method whose final value is the target of which the rounds are counted; None: they are not.
        speed_up: whether its rounds are divided by those until the target.
        targets: values in the unit of the table, by case, until which the rounds are counted in place of `until`.
        share_of: method of whose rounds to the same of the `targets` these are given in percent; None: they are not.
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
        """True for a value at the end, which has several statistics."""
        return self.at is None and not self.counts_rounds

    @property
    def needs_the_end(self) -> bool:
        """True where the last round of a run decides, its own or that of the method that sets the target."""
        return self.at is None and not self.targets

    @property
    def counts_rounds(self) -> bool:
        """True where the rounds until a target are counted."""
        return bool(self.until or self.targets)


@dataclass
class PaperTable(Drawing):
    """Published values beside ours: a row for each measure, case and method.

    Args:
        keys: measures, or log keys, by their names.
        paper: published values by measure and method, one for each case, in the unit of the table: shares in percent;
            `never` for a target that was not reached.
        cases: in the order of the published values; none: those of the experiment.
        statistics: of ours, `final`, `last five`, `best`; the first one is compared.
        baseline: method that the others are compared with, seed by seed; None: none.
        claims: methods that the paper says are ahead, each with those that it says are behind.
        paper_seeds: runs behind a published mean.
        beside: further log keys, which the table does not show; the csv of its runs keeps their curves.
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
        if unknown := [name for name in self.statistics if name not in HEADINGS]:
            raise ValueError(f"statistics must be of {', '.join(HEADINGS)}, got {unknown[0]}")
        if unknown := [name for name in self.paper if name not in self.keys]:
            raise ValueError(f"paper must hold values of {', '.join(self.keys)}, got {unknown[0]}")
        texts = [str(value) for rows in self.paper.values() for row in rows.values() for value in row]
        if wrong := [text for text in texts if any(map(str.isdigit, text)) and number_in(text) is None]:
            raise ValueError(f"a published value must be a number, 'mean ± deviation', or a word, got {wrong[0]!r}")

    def of_cases(self, cases: Sequence[str]) -> "PaperTable":
        """Give the table whose published values are those of these cases, unless it has its own.

        Raises:
            ValueError: there are not as many published values as cases, or a target is of none of them.
        """
        table = self if self.cases else replace(self, cases=cases)
        for measure in self.keys.values():
            for case in measure.targets if isinstance(measure, Measure) else ():
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
        """Collect the names of the rows that it compares with."""
        measures = [measure for measure in self.keys.values() if isinstance(measure, Measure)]
        counted = [name for measure in measures for name in (measure.until, measure.share_of)]
        claimed = [name for ahead, others in self.claims.items() for name in (ahead, *others)]
        return {name for name in (self.baseline, *counted, *claimed) if name}

    def log_keys(self) -> list[str]:
        return [measure if isinstance(measure, str) else measure.key for measure in self.keys.values()]

    def target_keys(self) -> list[str]:
        measures = [measure for measure in self.keys.values() if isinstance(measure, Measure)]
        return [measure.key for measure in measures if measure.counts_rounds]

    def draw(self, series: Sequence[Series]) -> Drawn:
        content = TableContent(self, series)
        rows = [
            content.row(measure, case, method)
            for measure in content.measures
            for case in content.cases
            for method in content.methods
            if content.is_known(measure, case, method)
        ]
        return Drawn(Table("", content.header(), rows), " ".join(content.sentences()))


class TableContent:
    """The content of a table: what is published, and what the runs reached.

    Args:
        table: settings.
        series: runs.
    """

    def __init__(self, table: PaperTable, series: Sequence[Series]) -> None:
        self.table = table
        self.series = {(each.case, each.method): each for each in series}
        shown = unique(each.case for each in series)
        self.columns = list(table.cases) or shown
        self.cases = [case for case in self.columns if case in shown]
        published = (method for values in table.paper.values() for method in values)
        self.methods = unique([*(each.method for each in series), *published])
        self.measures = {n: Measure(m) if isinstance(m, str) else m for n, m in table.keys.items()}
        self.runs = [run for each in series for run in each.group.runs]
        self.scales = {n: percent_factor(unit_in(self.runs, m.key)) for n, m in self.measures.items()}
        """Factors of the values in print, by measure: 100 for shares, which are in percent."""

    def direction(self, name: str) -> Direction:
        """Return whether values of a measure's log key are better when lower or higher.

        Raises:
            ValueError: nobody tells, or rounds are counted until a value that is better when lower.
        """
        measure = self.measures[name]
        direction = direction_in(self.runs, measure.key) if self.runs else direction_of(measure.key)
        if direction is None:
            raise ValueError(unknown_direction(measure.key))
        if measure.counts_rounds:
            check_target_key(measure.key, direction)
        return direction

    def prefers_low(self, name: str) -> bool:
        """True where lower is better in print."""
        measure = self.measures[name]
        if measure.counts_rounds:
            return not measure.speed_up
        return self.direction(name) == "min"

    def is_known(self, name: str, case: str, method: str) -> bool:
        """Return True for a row that is published, or that the experiment runs."""
        targets = self.measures[name].targets
        is_measured = not targets or case in targets
        return is_measured and ((case, method) in self.series or bool(self.published(name, case, method)))

    def published(self, name: str, case: str, method: str) -> str:
        """Look a published value up as text, empty where there is none."""
        values = self.table.paper.get(name, {}).get(method, ())
        i = self.columns.index(case)
        return "" if i >= len(values) or values[i] is None else str(values[i])

    def values(self, name: str, case: str, method: str, statistic: str) -> dict[Seeds, float]:
        """Compute ours by seeds, in the unit of the table, infinite where a target is never reached, or not yet.

        Where a value is that of the last round, the runs that have most rounds count.
        """
        measure = self.measures[name]
        series = self.series.get((case, method))
        values = dict[Seeds, float]()
        if measure.counts_rounds:
            self.direction(name)
        runs = series.group.runs if series else []
        most = max(map(rounds_of, runs), default=0) if measure.needs_the_end else 0
        for run in (run for run in runs if rounds_of(run) >= most):
            if measure.counts_rounds:
                value = self.rounds(name, case, run)
            else:
                value = value_at(run, measure, statistic)
                value = None if value is None else self.scales[name] * value
            if value is not None:
                values[run.seeds] = value
        return values

    def is_open(self, name: str, case: str, method: str, values: Mapping[Seeds, float]) -> bool:
        """True where rounds that are left may reach a target that a run of these values has not reached."""
        measure = self.measures[name]
        late = [seed for seed, value in values.items() if measure.counts_rounds and math.isinf(value)]
        names = (method, measure.until or method)
        return any(not self.has_all_rounds(each, case, seed) for each in names for seed in late)

    def has_all_rounds(self, method: str, case: str, seeds: Seeds) -> bool:
        """False for a run that is not at its end."""
        run = self.run_of(method, case, seeds)
        series = self.series.get((case, method))
        return not (run and series and series.all_rounds) or rounds_of(run) >= series.all_rounds

    def rounds(self, name: str, case: str, run: SavedRun) -> float | None:
        """Count the rounds until the target, or relate them to those of another method with the same seeds."""
        measure = self.measures[name]
        other = self.run_of(measure.until or measure.share_of, case, run.seeds)
        target = measure.targets[case] / self.scales[name] if case in measure.targets else None
        if measure.until and other:
            target = statistics_of(other, measure.key).get("final")
        if target is None or (measure.share_of and other is None):
            return None
        rounds = rounds_until(run, measure.key, target)
        if measure.share_of and other:
            base = rounds_until(other, measure.key, target)
            return None if base is None else math.inf if rounds is None else 100 * rounds / base
        if rounds is None:
            return -math.inf if measure.speed_up else math.inf
        return speed_up(rounds, rounds_of(other)) if measure.speed_up and other else rounds

    def run_of(self, method: str | None, case: str, seeds: Seeds) -> SavedRun | None:
        """Look up the run of a method with some seeds, None where there is none."""
        series = self.series.get((case, str(method)))
        return next((run for run in (series.group.runs if series else ()) if run.seeds == seeds), None)

    def at_baseline(self, name: str, case: str, method: str, baseline: str) -> dict[Seeds, float]:
        """Compute the baseline's values by seeds, at the end of as many rounds as the runs of a method have."""
        measure = self.measures[name]
        series = self.series.get((case, method))
        values = dict[Seeds, float]()
        if not measure.is_plain or (self.is_whole(case, method) and self.is_whole(case, baseline)):
            return self.values(name, case, baseline, self.table.statistics[0])
        for run in series.group.runs if series else ():
            other = self.run_of(baseline, case, run.seeds)
            if other and rounds_of(other) >= rounds_of(run):
                value = value_at(beginning(other, rounds_of(run)), measure, self.table.statistics[0])
                values |= {} if value is None else {run.seeds: self.scales[name] * value}
        return values

    def header(self) -> list[str]:
        """Name the columns."""
        plain = any(measure.is_plain for measure in self.measures.values())  # else there is but one statistic
        ours = [HEADINGS[statistic] for statistic in self.table.statistics] if plain else ["ours"]
        baseline = [f"ours − {self.table.baseline}"] * bool(self.table.baseline)
        return ["", "paper", *ours, "ours − paper", *baseline, "seeds × rounds"]

    def row(self, name: str, case: str, method: str) -> list[TableCell]:
        """Write the cells of a row."""
        measure = self.measures[name]
        statistics = self.table.statistics if measure.is_plain else self.table.statistics[:1]
        ours = [self.values(name, case, method, statistic) for statistic in statistics]
        published = self.published(name, case, method)
        first = ours[0]
        title = ", ".join(filter(None, (name if len(self.measures) > 1 else "", case, method)))
        texts = [spread(list(values.values()), decimal, counts=measure.counts_rounds) for values in ours]
        if self.is_open(name, case, method, first):
            texts = ["not yet" if text == "never" else text for text in texts]
        texts = [title, published or "–", *texts]
        texts += ["–"] * (len(self.header()) - len(texts) - 2 - bool(self.table.baseline))
        is_own = method in (measure.until, measure.share_of)  # which sets the target
        comparable = published if self.is_final(name, case, method) and not is_own else ""
        texts.append(difference_text(self.to_paper(comparable, list(first.values())), decimal))
        if self.table.baseline:
            base = self.at_baseline(name, case, method, self.table.baseline)
            difference = difference_text(paired(first, base, method != self.table.baseline), decimal)
            known = [seed for seed in first if math.isfinite(first[seed]) and math.isfinite(base.get(seed, math.inf))]
            some = f" ({len(known)} of {len(first)})" if difference != "–" and len(known) < len(first) else ""
            texts.append(difference + some)
        return list(map(TableCell, [*texts, self.runs_of(case, method)]))

    def is_whole(self, case: str, method: str) -> bool:
        """False for the first rounds of longer runs."""
        series = self.series.get((case, method))
        return series is None or series.is_whole

    def is_final(self, name: str, case: str, method: str) -> bool:
        """False for a value that the rest of the rounds may change."""
        measure = self.measures[name]
        needed = filter(None, (method, measure.until)) if measure.needs_the_end else ()
        return all(self.is_whole(case, each) for each in needed)

    def to_paper(self, published: str, ours: Sequence[float]) -> Interval:
        """Subtract the published value from ours."""
        value = number_in(published)
        if value is None or not all(map(math.isfinite, ours)):
            return Interval(math.nan, math.nan, math.nan)
        return welch_difference(ours, *value, count=self.table.paper_seeds)

    def runs_of(self, case: str, method: str) -> str:
        """Describe the runs of a row: seeds × rounds, what failed, or that it was not run."""
        series = self.series.get((case, method))
        if series is None or not (series.group.runs or series.failed):
            return "not run"
        counts = Counter(map(rounds_of, series.group.runs))
        whole = "" if series.is_whole else f" of {series.all_rounds}"
        parts = [f"{runs} × {rounds}{whole}" for rounds, runs in sorted(counts.items(), reverse=True)]
        return "; ".join([*parts, *series.failures])

    def sentences(self) -> list[str]:
        """Describe the columns, and count the claims of which some cells were run."""
        sentences = ["Mean ± sample standard deviation over the seeds; shares in percent."]
        sentences.append("95 % intervals of the differences: Welch's to the paper, Student's among ours, seed by seed.")
        needs_the_end = any(measure.needs_the_end for measure in self.measures.values())
        if needs_the_end and any(len(set(map(rounds_of, each.group.runs))) > 1 for each in self.series.values()):
            sentences.append("Seeds have unequal rounds: a final value is of the runs that have most of them.")
        for target in unique(measure.until for measure in self.measures.values() if measure.until):
            sentences.append(
                f"Rounds are counted until {target}'s final value; its own are those until it has that value first, "
                f"of which papers print all."
            )
        for name, measure in self.measures.items():
            if measure.targets:
                shown = {case: value for case, value in measure.targets.items() if case in self.cases}
                values = ", ".join(f"{value:g} ({case})" for case, value in shown.items())
                share = f", in percent of {measure.share_of}'s with the same seed" if measure.share_of else ""
                sentences.append(f"{name[:1].upper()}{name[1:]}: rounds until {values}{share}.")
        for ahead, others in self.table.claims.items():
            for other in others:
                for name in self.table.paper:
                    paper, ours = (self.leads(name, ahead, other, of_paper) for of_paper in (True, False))
                    if ours:  # what was not run says nothing of a claim
                        measured = f" in {name}" if len(self.measures) > 1 else ""
                        here = [leads for case, leads in paper.items() if case in ours]
                        these = f" ({sum(here)} of the {len(here)} run here)" if 0 < len(here) < len(paper) else ""
                        sentences.append(
                            f"{ahead} ahead of {other}{measured}: paper {sum(paper.values())} of {len(paper)} cells"
                            f"{these}, ours {sum(ours.values())} of {len(ours)}."
                        )
        return sentences

    def leads(self, name: str, ahead: str, other: str, of_paper: bool) -> dict[str, bool]:
        """Tell whether a method is ahead of another in the cases in which both are known."""
        pairs = {case: self.means(name, case, (ahead, other), of_paper) for case in self.columns}
        prefers_low = self.prefers_low(name)
        return {c: is_ahead(pair[0], pair[1], prefers_low) for c, pair in pairs.items() if pair}

    def means(self, name: str, case: str, methods: tuple[str, str], of_paper: bool) -> tuple[float, float] | None:
        """Give the published means of two methods, or ours over the seeds that both have, None where one is unknown."""
        if of_paper:
            worst = math.inf if self.prefers_low(name) else -math.inf
            texts = (self.published(name, case, method) for method in methods)
            first, second = ((worst, None) if text == NEVER else number_in(text) for text in texts)
            return first and second and (first[0], second[0])
        if not all(self.is_final(name, case, method) for method in methods):
            return None
        ours, theirs = (self.values(name, case, method, self.table.statistics[0]) for method in methods)
        seeds = [seed for seed in ours if seed in theirs]
        if not seeds or self.is_open(name, case, methods[0], ours) or self.is_open(name, case, methods[1], theirs):
            return None
        return mean_of([ours[seed] for seed in seeds]), mean_of([theirs[seed] for seed in seeds])


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
    """Take a statistic of a run's value, or the value after some rounds, None where it is not known."""
    if measure.at is None:
        return statistics_of(run, measure.key).get(statistic)
    return run.history.curve(measure.key).get(measure.at - 1)


def number_in(published: str) -> tuple[float, float | None] | None:
    """Read a published mean and its deviation, None where there is no number.

    >>> number_in("78.63 ± 0.42"), number_in("never"), number_in("")
    ((78.63, 0.42), None, None)
    """
    mean, _, std = published.partition("±")
    try:
        return float(mean), float(std) if std else None
    except ValueError:
        return None
