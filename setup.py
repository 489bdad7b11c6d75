"""Build cloudtrain: pyproject.toml says everything but where the packages lie."""

from setuptools import find_packages, setup

FILES = {"training.configs": "configs", "training.clusters": "clusters"}

setup(
    packages=[*find_packages(include=["commlib*", "datacache*", "pto*", "training*"]), *FILES],
    package_dir=FILES,
    py_modules=["cloudtrain"],
)
