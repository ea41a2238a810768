"""Packaging. The environment that is tested stands in requirements.lock; these are the ranges."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version():
    """Return normplugin.__version__ without importing the package."""
    text = (ROOT / "normplugin" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE).group(1)


def read_readme():
    """Return the README; a checkout without one still builds."""
    path = ROOT / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


# NVIDIA's apex is on no package index, and the package of that name there is another one: it must
# never be listed here.
EXTRAS = {
    "fairseq": [
        # The official release cannot be imported on Python 3.11 or later. On 3.10 it needs
        # pip < 24.1: later versions refuse the metadata of the omegaconf it asks for.
        'fairseq==0.12.2; python_version < "3.11"',
        'fairseq-fixed==0.12.3.1; python_version >= "3.11"',
        "numpy<2",  # fairseq's eos break mode (interactive generation) uses np.compat
        "torch",
    ],
    "megatron": [
        'megatron-core==0.16.1; python_version < "3.12"',
        'megatron-core>=0.17,<0.20; python_version >= "3.12"',
        "torch",
        "psutil",  # megatron-core's torch_dist checkpoints import it without asking for it
    ],
    "hf": ["transformers", "safetensors", "torch"],
    "report": ["matplotlib", "jinja2", "scipy"],
    # The same pins as requirements.lock (a test compares them), so that every editor, hook and CI
    # run judges a line alike.
    "dev": [
        "pytest==9.2.0",
        "pytest-xdist==3.8.0",
        "ruff==0.17.6",
        "mypy==2.4.1",
        "pre-commit>=4",
    ],
}

setup(
    name="normplugin",
    version=read_version(),
    description="NormFormer and Peri-LN for fairseq and Megatron-Core, through their plugin hooks",
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    author="normplugin authors",
    license="MIT",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["normplugin", "normplugin.*"]),
    package_data={"normplugin": ["**/*.yaml", "**/*.html", "**/*.css", "**/*.js", "**/*.md"]},
    install_requires=["numpy", "sentencepiece", "tqdm"],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["normplugin = normplugin.cli:main"]},
)
