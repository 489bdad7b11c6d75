"""Build cloudtrain: pyproject.toml says everything but where the packages lie."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["commlib*", "datacache*", "pto*", "training*"]), "training.configs"],
    package_dir={"training.configs": "configs"},
)
