"""From an experiment to its results: what is left is run, and what is done is drawn, after each seed and at the end."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fl_lightning.experiments.cell import Cell
from fl_lightning.experiments.cell_files import located
from fl_lightning.experiments.cells import Cells
from fl_lightning.experiments.merging import merge
from fl_lightning.experiments.results import (
    PictureFormat,
    draw,
    name_runs,
    series_of,
    stored_keys,
    unknown_keys,
    write_drawings,
    write_tables,
)
from fl_lightning.experiments.running import run_cells
from fl_lightning.experiments.tuning import tune
from fl_lightning.papers import Series
from fl_lightning.papers.drawing import unique
from fl_lightning.papers.stored import write_stored
from fl_lightning.runs.folder import Keep
from fl_lightning.utils.text import printable

KEPT = "checkpoints that stay when a run is complete; last: with which more rounds continue it"
"""Help of the option about checkpoints."""


class Maker:
    """Makes what an experiment asks for.

    Args:
        cells: Cells of the experiment.
        output: Folder of runs and results.
        processes: Number of runs at once. 0 runs them in this process.
        name: Name `paper/number`, by which drawings are filed.
        heading: Heading of the page.
        forms: Formats of the pictures.
        command: The command that makes the experiment. Empty: pages show none.
        keep: Checkpoints that stay when a run is complete. Those with which other runs begin stay always.
    """

    def __init__(
        self,
        cells: Cells,
        output: Path,
        processes: int,
        *,
        name: str = "",
        heading: str = "",
        forms: Sequence[PictureFormat] = (),
        command: str = "",
        keep: Keep = "none",
    ) -> None:
        self.cells = cells
        self.output = output
        self.processes = processes
        self.name = name
        self.heading = heading
        self.forms = forms
        self.command = command
        self.keep: Keep = keep
        self.tuned: list[str] = []
        """Sentences on what was tuned."""

    def make(self, notes: Sequence[str] = (), sources: Sequence[Path] = ()) -> None:
        """Run what is left, and write the results.

        Args:
            notes: Sentences that the tables need.
            sources: Folders whose runs are taken over.

        Raises:
            ValueError: Runs failed. The sentence names them, after the results of the others were written.
            KeyboardInterrupt: The runs were interrupted. The sentence tells how to go on.
        """
        table = f"{self.name}-tuning" if self.name else "tuning"
        self.tuned = tune(self.cells, self.processes, self.output, sources=sources, table=table, keep=self.keep)
        sentences = [*notes, *self.tuned]
        for sentence in sentences:
            print(printable(sentence))
        starts = located(self.cells.starts(), self.output)
        self.refuse(self.run(starts, sources))
        _, cells = self.cells.in_folder(self.output)
        failed = self.run(cells, sources, sentences)
        if not failed:
            self.write(cells, sentences, failed=failed, last=True)
            return
        sentences += [f"{name} failed: {error}" for name, error in failed.items()]
        # The error names the runs that failed, not the drawings that lack them.
        with suppress(ValueError):
            self.write(cells, sentences, failed=failed, last=True)
        self.refuse(failed)

    def run(self, cells: Sequence[Cell], sources: Sequence[Path], notes: Sequence[str] | None = None) -> dict[str, str]:
        """Take the runs of other folders over, and run what is left.

        Args:
            cells: The cells.
            sources: Folders whose runs are taken over.
            notes: Sentences of the tables, which are written after each seed. None writes no results.

        Returns:
            The sentences of the cells that failed, by name.
        """
        if cells:
            for source in sources:
                copied = merge(cells, source, self.output)
                print(printable(f"{copied} of {len(cells)} runs are taken over from {source}"))
        if notes is None:
            return run_cells(cells, self.processes, self.output)

        def on_seed(failed: Mapping[str, str]) -> None:
            # A drawing may need runs that are not done yet.
            with suppress(ValueError):
                self.write(cells, notes, failed=failed)

        return run_cells(cells, self.processes, self.output, on_seed=on_seed, keep=self.keep)

    def write(
        self,
        cells: Sequence[Cell],
        notes: Sequence[str],
        *,
        failed: Mapping[str, str],
        last: bool = False,
    ) -> None:
        """Write the results of what is done.

        Args:
            cells: The cells.
            notes: Sentences that the tables need.
            failed: Sentences of the cells that failed, by name.
            last: Whether all runs have ended. Then a comparison gets its report, and the console gets the names of the
                files.

        Raises:
            ValueError: A drawing lacks runs.
        """
        if last:
            name_runs(cells, self.output)
        series = series_of(cells, self.output, failed)
        experiment = self.cells.experiment
        if experiment.tables:
            write_tables(self.output, series, experiment.tables, notes=notes, report=last, command=self.command)
        if experiment.draw:
            self.draw(series, last)

    def draw(self, series: Sequence[Series], last: bool) -> None:
        """Draw pictures and tables, and store the values of the papers' tables.

        Args:
            series: Runs of all methods and cases.
            last: Whether all runs have ended. Then the console gets the captions and the names of the files, before
                that the log keys that no run has.

        Raises:
            ValueError: Drawings could not be made. The sentence names them, after the others were written.
        """
        drawings = self.cells.experiment.draw
        files: list[Path] = []
        keys = stored_keys(drawings)
        if keys:
            files.append(self.output / f"{self.name}.csv")
            write_stored(files[0], series, keys)
        contents, problems = draw(drawings, series, self.tuned)
        if contents:
            files += write_drawings(self.name, self.heading, contents, output=self.output, forms=self.forms)
        if last:
            for letter, (_, caption) in contents.items():
                print(printable(f"{self.name}{letter}: {caption}"))
            print(*(printable(str(path)) for path in files), sep="\n")
        else:
            unknown: list[str] = []
            for drawing in drawings.values():
                unknown += unknown_keys(drawing, series)
            for sentence in unique(unknown):
                print(printable(sentence))
        if problems:
            raise ValueError("; ".join(problems))

    def refuse(self, failed: Mapping[str, str]) -> None:
        """Raise if runs failed.

        Args:
            failed: Sentences of the cells that failed, by name.

        Raises:
            ValueError: Runs failed. The sentence names them.
        """
        if not failed:
            return
        runs = "run" if len(failed) == 1 else "runs"
        named = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise ValueError(
            f"{len(failed)} {runs} failed, and the tables are those of the others. {named}. "
            f"{self.output}/logs has what each printed; the same command tries them again"
        )
