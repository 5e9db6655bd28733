"""Writes three csv files, of two clinics and of both together: `python make_patients.py FOLDER`."""

import csv
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes


def main(folder: Path) -> None:
    """Write the files.

    Args:
        folder: Folder in which each clinic gets a folder.
    """
    diabetes = load_diabetes()
    table = np.column_stack([diabetes.data, diabetes.target / 100]).round(6)
    for name, rows in (("clinic_0", table[:300]), ("clinic_1", table[300:]), ("both", table)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        with (folder / name / "patients.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([[*diabetes.feature_names, "progress"], *rows.tolist()])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
