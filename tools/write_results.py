"""Writes docs/results.md and its pictures of the stored results: `python -m tools.write_results`.

`fl-lightning reproduce` leaves the results of an experiment, such as feded/table1, in results/feded/table1.csv.
Sentences about them may stand in results/feded/table1.md, and those about the papers' claims stand in
results/claims.md.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from fl_lightning.cli.configs import title
from fl_lightning.experiments import experiment_files as files
from fl_lightning.experiments.experiment import HOURS, Experiment
from fl_lightning.papers import Curves, PaperTable
from fl_lightning.papers.drawing import Series, beginning, counted, rounds_of, unique
from fl_lightning.papers.stored import csv_rows, read_stored
from fl_lightning.reports.result_tables import Table, as_markdown
from fl_lightning.reports.saved import Group
from tools.draw_methods import write_picture

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results.md"
IMAGES = "images/results"
"""Folder of the pictures, beside the page."""

CLAIMS = ROOT / "results" / "claims.md"
"""The results beside the papers' claims."""

HEAD = """# Results

The tables of the five papers beside what this package reached, written by `python -m tools.write_results` of
`results/PAPER/TABLE.csv`, in which each run has its whole curve, seconds, commit and machine. A table, or one
cell of it, is made by

```sh
fl-lightning reproduce feded/table1 --cases 'MNIST, β = 0.05' --methods FedAvg
```

in `reproduced/feded/table1.md`; `python -m tools.add_results reproduced feded/table1` adds its finished runs to
those here; a figure's cells need `--full`. The runs on a CPU had one thread each (`OMP_NUM_THREADS=1`): with one
thread on such a machine a cell's values come out the same, with two those of this cell differ by up to 0.2 points. The
last column has seeds × rounds, *18 of 100* where only the first ones were run, whose last value is not compared with
the paper's. *final*: after the last round; *best over rounds* is known to no one before the end of a run. Hours of CPU
time are those of the runs, also where they had more rounds than are shown. Cells that were not run are listed with what
they would cost: hours of one core of the machines named here, estimated for nets that need a GPU.
"""


@cache
def tables() -> list[tuple[str, Experiment, dict[str, PaperTable]]]:
    """Find the experiments with tables of a paper, as large as the paper's."""
    experiments = []
    for name in files.experiment_names():
        experiment = files.read_experiment(files.shipped_path(name))
        if experiment.full:
            experiment.enlarge()
        drawn = {key: drawing for key, drawing in experiment.draw.items() if isinstance(drawing, PaperTable)}
        if drawn:
            experiments.append((name, experiment, drawn))
    return experiments


def text() -> str:
    """Write the page."""
    parts = [HEAD, CLAIMS.read_text(encoding="utf-8")]
    papers = dict[str, None]()
    for name, experiment, drawn in tables():
        paper = name.partition("/")[0]
        if paper not in papers:
            papers[paper] = None
            parts.append(f"## {paper}\n")
        parts.append(f"### {name}\n\n{title(f'{files.FOLDER}/{name}')}\n")
        parts += section(name, experiment, drawn)
    return "\n".join(parts)


def section(name: str, experiment: Experiment, drawn: Mapping[str, PaperTable]) -> list[str]:
    """Write the results of an experiment's tables, their sources, and the cells that were not run."""
    path = ROOT / "results" / f"{name}.csv"
    series = read_stored(path) if path.is_file() else []
    parts = list[str]()
    if path.is_file():
        for key, drawing in drawn.items():
            parts += markdown_of(drawing, series, title=key if len(drawn) > 1 else "")
        caption = "Each method's values over the rounds that all of its runs have, and over those of longer ones"
        parts.append(made(path))
        parts.append(f"![{caption}]({image_of(name)})\n")
        remarks = path.with_suffix(".md")
        if remarks.is_file():
            parts.append(remarks.read_text(encoding="utf-8"))
    return [*parts, *not_run(experiment, {(each.case, each.method): each for each in series})]


def markdown_of(drawing: PaperTable, series: Sequence[Series], title: str) -> list[str]:
    """Write a table without the rows that were not run. Without a row there is no table."""
    content, caption = drawing.draw(series)
    if not isinstance(content, Table):
        return []
    rows = [row for row in content.rows if row[-1].text != "not run"]
    if not rows:
        return []
    return [as_markdown(replace(content, title=title, rows=rows, note=caption))]


def image_of(name: str) -> str:
    """Return the path of the picture of an experiment's curves, relative to the page."""
    return f"{IMAGES}/{name.replace('/', '-')}.png"


def draw_curves(name: str, drawn: Mapping[str, PaperTable]) -> None:
    """Draw the values of stored runs over the rounds, a panel for each column and log key of the table."""
    found = list[str]()
    for table in drawn.values():
        found += table.log_keys()
    keys = unique(found)
    value = f"{keys[0]} (%)" if len(keys) == 1 else "%"
    curves = Curves({key: key for key in keys}, value=value, width=3)
    series = read_stored(ROOT / "results" / f"{name}.csv")
    columns = [shared_rounds(each) for each in series]
    for each in series:
        of_longest = longest(each)
        if of_longest is not None:
            columns.append(of_longest)
    content = curves.draw(columns).content
    assert not isinstance(content, Table)
    write_picture(content, PAGE.parent / image_of(name))


def shared_rounds(series: Series) -> Series:
    """Cut the runs to the rounds that all have. A run that stopped early stays as it is."""
    rounds = [rounds_of(run) for run in series.group.runs if not run.stopped_early]
    runs = []
    for run in series.group.runs:
        runs.append(run if run.stopped_early else beginning(run, min(rounds)))
    return series._replace(group=Group("", runs))


def longest(series: Series) -> Series | None:
    """Take the runs that have more rounds than others as a column of their own, if none has failed."""
    runs = counted(series).group.runs
    if series.failed or len(runs) == len(series.group.runs):
        return None
    seeds = ", ".join(str(run.settings["seed_everything"]) for run in runs)
    return series._replace(case=f"{series.case}, seed {seeds}", group=Group("", runs))


def write(names: Container[str]) -> None:
    """Write the page, and the pictures of the results of some experiments."""
    PAGE.write_text(text(), encoding="utf-8")
    for name, _, drawn in tables():
        if name in names:
            draw_curves(name, drawn)


def made(path: Path) -> str:
    """Name the commits and machines of stored runs, and the time that they took."""
    rows = csv_rows(path)
    commits = unique(row["commit"] for row in rows if row["commit"])
    machines = unique(row["machine"] for row in rows if row["machine"])
    cpu_seconds = dict[tuple[str, str, str], str]()
    for row in rows:
        cpu_seconds.setdefault((row["case"], row["method"], row["seed"]), row["cpu_seconds"])
    count = numbered(len(cpu_seconds), "run")
    failed = len([row for row in rows if row["error"]])
    if failed:
        count += f", of which {failed} failed"
    known = [float(seconds) for seconds in cpu_seconds.values() if seconds]
    duration = ""
    if known:
        runs = f"{len(known)} of the runs" if len(known) < len(cpu_seconds) else "all runs"
        duration = f" {sum(known) / 3600:.1f} hours of CPU time for {runs}."
    return f"{count}; commit {', '.join(commits)}; {', '.join(machines)}.{duration}\n"


def numbered(number: int, noun: str) -> str:
    """Write a number with its noun.

    >>> numbered(1, "run"), numbered(2, "run")
    ('1 run', '2 runs')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class Remaining:
    """Collects the work of a case that was not run."""

    def __init__(self) -> None:
        self.methods: list[str] = []
        self.hours = 0.0
        self.seed_counts: set[int] = set()

    def line(self, case: str) -> str:
        return f"- {case or 'all'}: {'; '.join(self.methods)}{cost(self.hours, self.seed_counts)}"


def not_run(experiment: Experiment, series: Mapping[tuple[str, str], Series]) -> list[str]:
    """List the cells, seeds and later rounds that were not run, with their cost. The table has those that failed.

    Args:
        experiment: The experiment.
        series: The stored runs by case and method.
    """
    remaining = dict[str, Remaining]()
    for runs in experiment.runs:
        seeds = [str(seed) for seed in runs.seeds or experiment.seeds]
        for case, settings in experiment.cases_of(runs).items():
            for method in runs.methods:
                label = runs.label or method
                shares = shares_of(series.get((case, label)))
                lacking = [seed for seed in seeds if shares.get(seed, 0.0) < 1]
                if lacking:
                    of_case = remaining.setdefault(case, Remaining())
                    of_case.methods.append(label + which(lacking, len(seeds), shares))
                    whole_runs = sum(1 - shares.get(seed, 0.0) for seed in lacking)
                    of_case.hours += settings.get(HOURS, 0.0) * whole_runs
                    of_case.seed_counts.add(len(seeds))
    if not remaining:
        return []
    lines = [of_case.line(case) for case, of_case in remaining.items()]
    return ["Not run:\n", "\n".join(lines) + "\n"]


def which(seeds: Sequence[str], wanted: int, begun: Container[str]) -> str:
    """Name the seeds that lack rounds, unless all do alike, and tell the seeds that have some.

    Args:
        seeds: The seeds that lack rounds.
        wanted: Number of all seeds.
        begun: The seeds that have some rounds.

    >>> which(["0", "1", "2"], 3, {"0", "1"}), which(["0", "1"], 2, {"0", "1"}), which(["0"], 1, {})
    (' (seeds 0, 1 after the rounds above, seed 2)', ' (after the rounds above)', '')
    """
    after = "after the rounds above"
    some = [seed for seed in seeds if seed in begun]
    none = [seed for seed in seeds if seed not in begun]
    if len(seeds) == wanted and not none:
        return f" ({after})"
    if len(seeds) == wanted and not some:
        return ""
    named = []
    if some:
        named.append(f"{seed_list(some)} {after}")
    if none:
        named.append(seed_list(none))
    return f" ({', '.join(named)})"


def seed_list(seeds: Sequence[str]) -> str:
    """Write seeds as text.

    >>> seed_list(["0"]), seed_list(["0", "2"])
    ('seed 0', 'seeds 0, 2')
    """
    noun = "seeds" if len(seeds) > 1 else "seed"
    return f"{noun} {', '.join(seeds)}"


def shares_of(series: Series | None) -> dict[str, float]:
    """Compute the share of its rounds that each seed has. It is 1 for a seed that failed."""
    if series is None:
        return {}
    shares = {}
    for run in series.group.runs:
        rounds = rounds_of(run)
        shares[run.seed] = rounds / (series.all_rounds or rounds)
    return shares | dict.fromkeys(series.failed, 1.0)


def cost(hours: float, seeds: Iterable[int]) -> str:
    """Write the cost of cells and the number of their seeds. It is empty if the cost is not known.

    >>> cost(0.25, {1}), cost(120.4, {3}), cost(0, {1})
    (' (0.2 core-hours for one seed)', ' (120 core-hours for 3 seeds)', '')
    """
    if not hours:
        return ""
    number = " or ".join(str(count) for count in sorted(seeds))
    noun = "one seed" if number == "1" else f"{number} seeds"
    decimals = 0 if hours > 10 else 1
    return f" ({hours:,.{decimals}f} core-hours for {noun})"


if __name__ == "__main__":
    write([name for name, _, _ in tables() if (ROOT / "results" / f"{name}.csv").is_file()])
