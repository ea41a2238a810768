"""The bootstrap installs what changed and nothing else; the lock and setup.py agree."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"([A-Za-z0-9_.-]+)==([0-9][A-Za-z0-9.]*)( ; sys_platform == \"linux\")?")


@pytest.fixture
def tool(monkeypatch) -> ModuleType:
    """Return tools/bootstrap.py with venv and pip replaced by a record of calls."""
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "tools" / "bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.calls = []

    def run(command, **options):
        env = Path(command[-1])
        (env / "bin").mkdir(parents=True)
        module.env_python(env).touch()
        module.calls.append("venv")

    monkeypatch.setattr(module, "find_python", lambda wanted: ("python3.12", "3.12.0"))
    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.setattr(module, "env_python", lambda env: env / "bin" / "python")
    monkeypatch.setattr(module, "pip", lambda env, quiet, *words: module.calls.append(words[-2]))
    return module


def test_a_second_run_does_nothing(tool, tmp_path):
    """First run: venv, lock, project. Second run: no call at all."""
    env = tmp_path / "env"
    assert tool.bootstrap(env) == env / "bin" / "python"
    assert tool.calls == ["venv", "-r", "-e"]
    tool.bootstrap(env)
    assert len(tool.calls) == 3


def test_another_checkout_reinstalls_only_the_project(tool, tmp_path, monkeypatch):
    """A shared environment follows the checkout that is being used, without a new download."""
    tool.bootstrap(tmp_path / "env")
    for name in ("setup.py", "pyproject.toml", "normplugin/__init__.py"):
        target = tmp_path / "clone" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    monkeypatch.setattr(tool, "ROOT", tmp_path / "clone")
    tool.bootstrap(tmp_path / "env")
    assert tool.calls[3:] == ["-e"]


def test_a_changed_lock_is_installed_in_place(tool, tmp_path, monkeypatch):
    """A new lock installs the lock and the project, not a new venv."""
    tool.bootstrap(tmp_path / "env")
    lock = tmp_path / "requirements.lock"
    lock.write_text("numpy==1.0\n", encoding="utf-8")
    monkeypatch.setattr(tool, "LOCK", lock)
    tool.bootstrap(tmp_path / "env")
    assert tool.calls[3:] == ["-r", "-e"]


def test_an_interrupted_install_starts_over(tool, tmp_path, monkeypatch):
    """An interrupted pip leaves no ready stamp, and the next run empties the folder first."""
    env = tmp_path / "env"

    def interrupted(*words):
        (env / "half-installed").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tool, "pip", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tool.bootstrap(env)
    assert tool.read_stamp(env) == {"state": "installing"}
    tool.bootstrap(env)
    assert not (env / "half-installed").exists()
    assert tool.read_stamp(env)["state"] == "ready"


def test_an_interrupted_project_install_is_repeated(tool, tmp_path, monkeypatch):
    """Until pip has finished, the stamp names no checkout: the old one is not trusted either."""
    env = tmp_path / "env"
    tool.bootstrap(env)
    monkeypatch.setattr(tool, "project_digest", lambda: "changed")
    with monkeypatch.context() as patch:
        patch.setattr(tool, "install_project", lambda *words: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tool.bootstrap(env)
    assert "checkout" not in tool.read_stamp(env)


def test_a_folder_with_foreign_files_is_refused(tool, tmp_path):
    """Nothing is deleted from, or installed into, a folder that is not ours."""
    (tmp_path / "precious").touch()
    with pytest.raises(tool.BootstrapError, match=r"environment: got .*Set NORMPLUGIN_ENV"):
        tool.bootstrap(tmp_path)
    assert (tmp_path / "precious").exists() and not tool.calls


def test_no_python_3_12_is_one_line(tmp_path):
    """The message says which Pythons were found and what to install."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bootstrap.py"), "--python", "/nonexistent/python"],
        env={"PATH": "/usr/bin:/bin:/usr/local/bin", "NORMPLUGIN_ENV": str(tmp_path / "env")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert re.fullmatch(r"bootstrap: error: Python: got .*needs 3\.12\. Install .*\n", done.stderr)


def pins() -> dict[str, str]:
    """Return the lock as name -> version; every line must be a pin and nothing else."""
    found = {}
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            match = PIN.fullmatch(line)
            assert match, line
            found[match.group(1).lower()] = match.group(2)
    return found


@pytest.fixture
def setup_arguments(monkeypatch) -> dict:
    """Return what setup.py hands to setuptools."""
    setuptools = pytest.importorskip("setuptools")
    seen: dict = {}
    monkeypatch.setattr(setuptools, "setup", lambda **words: seen.update(words))
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    return seen


def test_the_developer_tools_are_the_locked_ones(setup_arguments):
    """Exact pins in setup.py's extras equal the lock's, on the Python the lock is for."""
    locked = pins()
    exact = [item for item in setup_arguments["extras_require"]["dev"] if "==" in item]
    assert len(exact) == 4
    assert all(locked[name] == version for name, version in (i.split("==") for i in exact))
    assert f"fairseq-fixed=={locked['fairseq-fixed']}; " in str(setup_arguments["extras_require"])


def test_nothing_asks_for_a_package_called_apex(setup_arguments):
    """The package of that name on the index is not NVIDIA's."""
    required = [*setup_arguments["install_requires"], *pins()]
    for items in setup_arguments["extras_require"].values():
        required += items
    assert not [item for item in required if re.match(r"apex\b", item)]


def test_the_base_package_needs_no_framework(setup_arguments):
    """Both torch and the frameworks come with extras only, and the version is the package's own."""
    import normplugin

    assert setup_arguments["install_requires"] == ["numpy", "sentencepiece", "tqdm"]
    assert setup_arguments["version"] == normplugin.__version__
    assert all(name.startswith("normplugin") for name in setup_arguments["packages"])
