"""Puts configs/ of a clone into the built package, which setup.cfg cannot say."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["fl_lightning*"]), "fl_lightning.configs"],
    package_dir={"fl_lightning.configs": "configs"},
)
