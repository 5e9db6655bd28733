"""What setup.cfg cannot say: configs/ of a clone lies within the package once it is built."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["fl_lightning*"]), "fl_lightning.configs"],
    package_dir={"fl_lightning.configs": "configs"},
)
