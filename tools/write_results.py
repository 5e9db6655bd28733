"""Write docs/results.md and its pictures of the stored results: `python -m tools.write_results`.

Results of an experiment, such as feded/table1, stand in results/feded/table1.csv as `fl-lightning reproduce` leaves
them; sentences on them, if there are any, in results/feded/table1.md, and what they say of the papers' claims in
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
"""What the results say of the papers' claims."""
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
        if drawn := {of: drawing for of, drawing in experiment.draw.items() if isinstance(drawing, PaperTable)}:
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
    """Write what was reached of a table, how, and what was not run."""
    path = ROOT / "results" / f"{name}.csv"
    series = list[Series]()
    parts = list[str]()
    if path.is_file():
        series = read_stored(path)
        for of, table in drawn.items():
            content, caption = table.draw(series)
            rows = [row for row in content.rows if row[-1].text != "not run"] if isinstance(content, Table) else []
            if rows and isinstance(content, Table):
                parts.append(as_markdown(replace(content, title=of if len(drawn) > 1 else "", rows=rows, note=caption)))
        seen = "Each method's values over the rounds that all of its runs have, and over those of longer ones"
        parts += [made(path), f"![{seen}]({image_of(name)})\n"]
        if (remarks := path.with_suffix(".md")).is_file():
            parts.append(remarks.read_text(encoding="utf-8"))
    return [*parts, *left(experiment, {(each.case, each.method): each for each in series})]


def image_of(name: str) -> str:
    """Name the picture of an experiment's curves, seen from the page."""
    return f"{IMAGES}/{name.replace('/', '-')}.png"


def draw_curves(name: str, drawn: Mapping[str, PaperTable]) -> None:
    """Draw the values of stored runs over the rounds, a panel for each column and log key of the table."""
    keys = unique(key for table in drawn.values() for key in table.log_keys())
    curves = Curves({key: key for key in keys}, value=f"{keys[0]} (%)" if len(keys) == 1 else "%", width=3)
    series = read_stored(ROOT / "results" / f"{name}.csv")
    content = curves.draw([*map(shared_rounds, series), *filter(None, map(longest, series))]).content
    assert not isinstance(content, Table)
    write_picture(content, PAGE.parent / image_of(name))


def shared_rounds(series: Series) -> Series:
    """Cut the runs to the rounds that all have. A run that stopped early has no further ones, and stays as it is."""
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
    commits, machines = (unique(row[name] for row in rows if row[name]) for name in ("commit", "machine"))
    runs = dict[tuple[str, str, str], str]()
    for row in rows:
        runs.setdefault((row["case"], row["method"], row["seed"]), row["cpu_seconds"])
    failed = sum(bool(row["error"]) for row in rows)
    known = [float(seconds) for seconds in runs.values() if seconds]
    part = f"{len(known)} of the runs" if len(known) < len(runs) else "all runs"
    took = f" {sum(known) / 3600:.1f} hours of CPU time for {part}." if known else ""
    count = f"{len(runs)} run{'s' * (len(runs) != 1)}" + f", of which {failed} failed" * bool(failed)
    return f"{count}; commit {', '.join(commits)}; {', '.join(machines)}.{took}\n"


def left(experiment: Experiment, series: Mapping[tuple[str, str], Series]) -> list[str]:
    """List what was not run: cells, seeds, and later rounds, with their cost; what failed is in the table."""
    methods = dict[str, list[str]]()
    hours = dict[str, float]()
    counts = dict[str, set[int]]()
    for runs in experiment.runs:
        wanted = list(map(str, runs.seeds or experiment.seeds))
        for case, settings in experiment.cases_of(runs).items():
            for method in runs.methods:
                label = runs.label or method
                shares = shares_of(series.get((case, label)))
                lacking = [seed for seed in wanted if shares.get(seed, 0.0) < 1]
                if lacking:
                    methods.setdefault(case, []).append(label + which(lacking, len(wanted), shares))
                    share = sum(1 - shares.get(seed, 0.0) for seed in lacking)
                    hours[case] = hours.get(case, 0.0) + settings.get(HOURS, 0.0) * share
                    counts.setdefault(case, set()).add(len(wanted))
    lines = [
        f"- {case or 'all'}: {'; '.join(names)}{cost(hours[case], counts[case])}" for case, names in methods.items()
    ]
    return ["Not run:\n", "\n".join(lines) + "\n"] if lines else []


def which(seeds: Sequence[str], wanted: int, begun: Container[str]) -> str:
    """Name the seeds that lack rounds, unless all do alike, and tell those that have some.

    >>> which(["0", "1", "2"], 3, {"0", "1"}), which(["0", "1"], 2, {"0", "1"}), which(["0"], 1, {})
    (' (seeds 0, 1 after the rounds above, seed 2)', ' (after the rounds above)', '')
    """
    after = "after the rounds above"
    parts = {after: [seed for seed in seeds if seed in begun], "": [seed for seed in seeds if seed not in begun]}
    if len(seeds) == wanted and not all(parts.values()):
        return f" ({after})" if parts[after] else ""
    named = (f"seed{'s' * (len(part) > 1)} {', '.join(part)} {text}".strip() for text, part in parts.items() if part)
    return f" ({', '.join(named)})"


def shares_of(series: Series | None) -> dict[str, float]:
    """Compute the share of its rounds that each seed has, 1 where it failed."""
    if series is None:
        return {}
    shares = {run.seed: rounds_of(run) / (series.all_rounds or rounds_of(run)) for run in series.group.runs}
    return shares | dict.fromkeys(series.failed, 1.0)


def cost(hours: float, seeds: Iterable[int]) -> str:
    """Write the cost of cells and the number of their seeds, empty where it is not known.

    >>> cost(0.25, {1}), cost(120.4, {3}), cost(0, {1})
    (' (0.2 core-hours for one seed)', ' (120 core-hours for 3 seeds)', '')
    """
    number = " or ".join(map(str, sorted(seeds)))
    of = "one seed" if number == "1" else f"{number} seeds"
    return f" ({hours:,.{0 if hours > 10 else 1}f} core-hours for {of})" if hours else ""


if __name__ == "__main__":
    write([name for name, _, _ in tables() if (ROOT / "results" / f"{name}.csv").is_file()])
