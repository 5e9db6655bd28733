"""From an experiment to its results: what is left is run, and what is done is drawn, after each seed and at the end."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from fl_lightning.experiments.cells import Cell, Cells, located
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
from fl_lightning.utils.text import printable


class Maker:
    """Makes what an experiment asks for.

    Args:
        cells: of the experiment.
        output: folder of runs and results.
        processes: runs at once; 0: in this process.
        name: `paper/number`, by which drawings are filed.
        heading: of the page.
        forms: of the pictures.
    """

    def __init__(
        self,
        cells: Cells,
        output: Path,
        processes: int,
        name: str = "",
        heading: str = "",
        forms: Sequence[PictureFormat] = (),
    ) -> None:
        self.cells = cells
        self.output = output
        self.processes = processes
        self.name = name
        self.heading = heading
        self.forms = forms
        self.tuned = list[str]()
        """Sentences on what was tuned."""

    def make(self, notes: Sequence[str] = (), sources: Sequence[Path] = ()) -> None:
        """Run what is left, and write the results.

        Args:
            notes: sentences that the tables need.
            sources: folders whose runs are taken over.

        Raises:
            ValueError: naming the runs that failed, after the results of the others were written.
            KeyboardInterrupt: naming how to go on.
        """
        table = f"{self.name}-tuning" if self.name else "tuning"
        self.tuned = tune(self.cells, self.processes, self.output, sources=sources, table=table)
        for note in (notes := [*notes, *self.tuned]):
            print(printable(note))
        starts = located(self.cells.starts(), self.output)
        failed = self.run(starts, sources)
        self.refuse(failed)
        _, cells = self.cells.in_folder(self.output)
        failed = self.run(cells, sources, notes)
        notes = [*notes, *(f"{name} failed: {error}" for name, error in failed.items())]
        with suppress(ValueError) if failed else nullcontext():  # what failed is said, not what lacks it
            self.write(cells, notes, failed, last=True)
        self.refuse(failed)

    def run(self, cells: Sequence[Cell], sources: Sequence[Path], notes: Sequence[str] | None = None) -> dict[str, str]:
        """Take the runs of other folders over, and run what is left, with notes writing the results after each seed."""
        for source in sources if cells else ():
            copied = merge(cells, source, self.output)
            print(printable(f"{copied} of {len(cells)} runs are taken over from {source}"))

        def on_seed(failed: Mapping[str, str]) -> None:
            with suppress(ValueError):  # a drawing may need what is not done yet
                self.write(cells, notes or [], failed)

        return run_cells(cells, self.processes, self.output, on_seed=None if notes is None else on_seed)

    def write(self, cells: Sequence[Cell], notes: Sequence[str], failed: Mapping[str, str], last: bool = False) -> None:
        """Write what is done, the last time with the report of a comparison and the names of the files on the console.

        Raises:
            ValueError: a drawing lacks runs.
        """
        if last:
            name_runs(cells, self.output)
        series = series_of(cells, self.output, failed)
        experiment = self.cells.experiment
        if experiment.tables:
            write_tables(self.output, series, experiment.tables, notes=notes, report=last)
        if experiment.draw:
            self.draw(series, last)

    def draw(self, series: Sequence[Series], last: bool) -> None:
        """Draw pictures and tables, and store the values of the papers' tables.

        Raises:
            ValueError: naming the drawings that could not be made, after the others were written.
        """
        drawings = self.cells.experiment.draw
        files = list[Path]()
        if keys := stored_keys(drawings):
            files.append(self.output / f"{self.name}.csv")
            write_stored(files[0], series, keys)
        contents, problems = draw(drawings, series, self.tuned)
        if contents:
            files += write_drawings(self.name, self.heading, contents, output=self.output, forms=self.forms)
        if last:
            for letter, (_, caption) in contents.items():
                print(printable(f"{self.name}{letter}: {caption}"))
            print(*(printable(str(path)) for path in files), sep="\n")
        else:  # before the other seeds are trained
            for text in unique(text for drawing in drawings.values() for text in unknown_keys(drawing, series)):
                print(printable(text))
        if problems:
            raise ValueError("; ".join(problems))

    def refuse(self, failed: Mapping[str, str]) -> None:
        """Raise where runs failed.

        Raises:
            ValueError: naming them.
        """
        if failed:
            named = "; ".join(f"{name}: {error}" for name, error in failed.items())
            raise ValueError(
                f"{len(failed)} run{'s' * (len(failed) != 1)} failed, and the tables are those of the others. {named}. "
                f"{self.output}/logs has what each printed; the same command tries them again"
            )
