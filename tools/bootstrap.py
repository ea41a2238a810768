"""Make the development environment: a Python 3.12 venv that holds requirements.lock.

Needs only the standard library of any Python >= 3.8; it looks for a Python 3.12 and says which one
it took. The environment stands in $NORMPLUGIN_ENV or, without it, in .venv of the checkout. A run
that finds everything in place does nothing. The last line printed is the environment's Python.

The project itself is installed editable, and again whenever another checkout uses the same
environment. Commands that must see one checkout for sure (the Makefile's) also put it on
PYTHONPATH, because two checkouts may share an environment at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
WANTED = (3, 12)
STAMP = "normplugin-env.json"
PROBE = "import ensurepip, sys, venv; print(*sys.version_info[:3]); print(sys.executable)"
ADVICE = (
    "Install one (Debian, Ubuntu: python3.12 and python3.12-venv; pyenv install 3.12; "
    "uv python install 3.12; or python.org), then run this again, or name it with --python PATH."
)


class BootstrapError(Exception):
    """Something the user has to settle; printed as one line."""


def main() -> int:
    """Make or update the environment; return 0, or 1 with one line on stderr."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", metavar="PATH", help="the Python 3.12 to build on")
    parser.add_argument("--print-python", action="store_true", help="print only the last line")
    args = parser.parse_args()
    try:
        python = bootstrap(environment_folder(), args.python, quiet=args.print_python)
    except (BootstrapError, OSError) as error:
        print(f"bootstrap: error: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd[:5]))
        print(f"bootstrap: error: exit {error.returncode} from {command} ...", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bootstrap: interrupted; the next run starts over.", file=sys.stderr)
        return 130
    print(python)
    return 0


def environment_folder() -> Path:
    """Return $NORMPLUGIN_ENV, or .venv in the checkout."""
    named = os.environ.get("NORMPLUGIN_ENV", "")
    return Path(named).expanduser().absolute() if named else ROOT / ".venv"


def bootstrap(env: Path, wanted_python: str | None = None, quiet: bool = False) -> Path:
    """Bring `env` to the state the stamp describes and return its Python."""
    target = {"lock": digest(LOCK), "project": project_digest(), "checkout": str(ROOT)}
    if read_stamp(env) == dict(target, state="ready") and env_python(env).exists():
        return env_python(env)
    refuse_foreign(env)
    env.mkdir(parents=True, exist_ok=True)
    with only_one(env):
        stamp = read_stamp(env)  # another process may have finished while this one waited
        if stamp.get("state") != "ready" or not env_python(env).exists():
            create(env, wanted_python, quiet)
            stamp = {}
        if stamp.get("lock") != target["lock"]:
            install_lock(env, quiet)
        if stamp != dict(target, state="ready"):
            write_stamp(env, {"state": "ready", "lock": target["lock"]})
            install_project(env, quiet)
            write_stamp(env, dict(target, state="ready"))
    return env_python(env)


def refuse_foreign(env: Path) -> None:
    """Raise when `env` holds something this program did not make."""
    if env.exists() and not env.is_dir():
        raise BootstrapError(f"environment: got {env}; that is a file. Name a folder.")
    ours = {STAMP, STAMP + ".new", STAMP + ".busy"}
    if env.is_dir() and not (env / STAMP).exists() and {p.name for p in env.iterdir()} - ours:
        raise BootstrapError(
            f"environment: got {env}; it holds files that this program did not write. "
            "Set NORMPLUGIN_ENV to an empty or new folder, or delete that one."
        )


def create(env: Path, wanted_python: str | None, quiet: bool) -> None:
    """Make an empty venv; whatever an interrupted run left is removed first."""
    base, version = find_python(wanted_python)
    say(quiet, f"Python {version}: {base}")
    say(quiet, f"environment: {env}")
    write_stamp(env, {"state": "installing"})
    for path in env.iterdir():
        if path.name in (STAMP, STAMP + ".busy"):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    subprocess.run([base, "-m", "venv", str(env)], check=True)


def install_lock(env: Path, quiet: bool) -> None:
    """Install every pin; the lock is complete, so nothing is resolved."""
    write_stamp(env, {"state": "installing"})
    say(quiet, f"installing {LOCK.name} (about 5 GB, most of it torch; minutes the first time)")
    start = time.monotonic()
    pip(env, quiet, "install", "--no-deps", "-r", str(LOCK))
    say(quiet, f"installed in {time.monotonic() - start:.0f} s")


def install_project(env: Path, quiet: bool) -> None:
    """Point the environment's `normplugin` command and imports at this checkout."""
    say(quiet, f"installing the project from {ROOT}")
    pip(env, True, "install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))


def pip(env: Path, quiet: bool, *arguments: str) -> None:
    """Run the environment's pip; its output goes to stderr, so that stdout ends in the path."""
    command = [str(env_python(env)), "-m", "pip", *arguments, "--disable-pip-version-check"]
    command += ["--no-input", *(["--quiet"] if quiet else [])]
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    subprocess.run(command, check=True, stdout=sys.stderr.fileno(), env=environ)


def find_python(wanted: str | None = None) -> tuple[str, str]:
    """Return (path, version) of the first Python 3.12 that can make a venv."""
    seen: list[str] = []
    for command in [[wanted]] if wanted else candidates():
        version, path = probe(command)
        if version[:2] == WANTED:
            return path, ".".join(map(str, version))
        if version:
            seen.append(f"{'.'.join(map(str, version))} ({' '.join(command)})")
        elif Path(command[0]).exists() and "shims" not in Path(command[0]).parts:
            seen.append(f"{command[0]} (cannot run, or lacks the venv and ensurepip modules)")
    found = "; ".join(dict.fromkeys(seen)) or wanted or "none"
    raise BootstrapError(f"Python: got {found}; the environment needs 3.12. {ADVICE}")


def candidates() -> Iterator[list[str]]:
    """Yield commands that may start a Python 3.12, the likeliest and cheapest first."""
    yield [sys.executable]
    for name in ("python3.12", "python3", "python"):
        path = shutil.which(name)
        if path:
            yield [path]
    for root in pyenv_roots():
        for version in sorted((root / "versions").glob("3.12*"), reverse=True):
            yield [str(version / "bin" / "python")]
    if shutil.which("py"):
        yield ["py", "-3.12"]
    uv = shutil.which("uv")
    if uv:
        for arguments in (["find", "3.12"], ["install", "3.12"], ["find", "3.12"]):
            path = output([uv, "python", *arguments])  # `install` prints no path: probed in vain
            if path and arguments[0] == "find":
                yield [path.splitlines()[-1]]


def pyenv_roots() -> list[Path]:
    """Return the folders pyenv may keep its versions in."""
    roots = [os.environ.get("PYENV_ROOT", ""), "~/.pyenv"]
    if shutil.which("pyenv"):
        roots.insert(0, output(["pyenv", "root"]))
    return [Path(root).expanduser() for root in dict.fromkeys(roots) if root]


def probe(command: list[str]) -> tuple[tuple[int, ...], str]:
    """Return (version, executable) of an interpreter, or ((), "") when it cannot make a venv."""
    lines = output([*command, "-c", PROBE]).splitlines()
    if len(lines) != 2:
        return (), ""
    return tuple(map(int, lines[0].split())), lines[1]


def output(command: list[str]) -> str:
    """Return what a command prints, or nothing when it fails or hangs."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=300, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace").strip()


def env_python(env: Path) -> Path:
    """Return the path of the environment's interpreter."""
    return env / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def digest(*paths: Path) -> str:
    """Return a hash of the files' contents."""
    content = b"".join(path.read_bytes() for path in paths)
    return hashlib.sha256(content).hexdigest()


def project_digest() -> str:
    """Return a hash of what the editable install depends on."""
    return digest(ROOT / "setup.py", ROOT / "pyproject.toml", ROOT / "normplugin" / "__init__.py")


def read_stamp(env: Path) -> dict[str, str]:
    """Return the stamp, or an empty one when it is absent or unreadable."""
    try:
        stamp = json.loads((env / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(env: Path, stamp: dict[str, str]) -> None:
    """Replace the stamp in one step, so that no reader sees half of it."""
    new = env / (STAMP + ".new")
    new.write_text(json.dumps(stamp, indent=1), encoding="utf-8")
    os.replace(new, env / STAMP)


@contextlib.contextmanager
def only_one(env: Path) -> Iterator[None]:
    """Hold the environment's lock; the system releases it when the process dies."""
    with open(env / (STAMP + ".busy"), "w", encoding="utf-8") as handle:
        try:
            import fcntl
        except ImportError:  # Windows: two runs at once are the user's care
            yield
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"waiting for another run that prepares {env}", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def say(quiet: bool, message: str) -> None:
    """Print a line of progress."""
    if not quiet:
        print(f"bootstrap: {message}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
