"""What the tests here share: where the package is, the smallest comparison, and runs by hand."""

from __future__ import annotations

import math
from pathlib import Path

import normplugin
from normplugin.compare.arms import Arm, parse
from normplugin.compare.collect import Entry
from normplugin.compare.frameworks import Dataset
from normplugin.compare.plan import Job, Settings
from normplugin.compare.record import Record
from normplugin.compare.results import FINISHED, Point, Ramp, Run
from normplugin.compare.run import Done
from normplugin.data.encode import SplitCounts
from normplugin.data.manifest import Manifest

ROOT = Path(normplugin.__file__).resolve().parent.parent
# A checkpoint after every second update, six updates.
ARGUMENTS = ("--updates", "6", "--threads", "1", "--arms", "normformer")
VALID = SplitCounts(documents=10, tokens=1000, words=400, bytes=3000)
DATA = Dataset(
    Path("data"),
    Manifest(1, {}, {"name": "t"}, {}, "", {}, {}, {}, {"valid": VALID}, {"fairseq/a": "b"}),
    "fairseq",
)
FACTS = {
    "data": "a1",
    "window": 128,
    "seed": 1,
    "log base": 2.0,
    "learning rate": [0.002],
    "trained tokens": 8000,
    "tokens per update": [[10.0, 2048.0], [20.0, 2048.0], [30.0, 2048.0]],
    "updates": 30,
    "scored tokens": 1000,
}
SCHEMES = {arm.name: arm for arm in parse(["preln", "normformer", "periln"])}


def job(arm: str | Arm = "preln", lr: float = 2e-3, seed: int = 1) -> Job:
    """A run to be; nothing of it is on the disk."""
    return Job(SCHEMES[arm] if isinstance(arm, str) else arm, lr, seed, Path("runs"))


def entry(
    arm="preln", loss=2.0, lr=2e-3, seed=1, status=FINISHED, speed=100.0, more=0, ramp=None, **facts
) -> Entry:
    """A run that is over, by hand: its loss halves the way to the end every ten updates."""
    it = job(arm, lr, seed)
    parameters = 1000 + Settings().promised_parameters(it.arm) + more
    record = Record(FACTS | {"seed": seed} | facts, "M", None, parameters, loss, 1000, None)
    ended = status == FINISHED
    run = Run(
        lr=lr,
        seed=seed,
        status=status,
        stopped_at=None if ended else 20,
        reason=None if ended else "no memory",
        command=["train"],
        log="log",
        train=[Point(10, 80, 1.0, 5.0)],
        valid=[Point(u, 8 * u, 100.0 * u / speed, loss + 30 / u - 1) for u in (10, 20, 30)],
        step_seconds=0.1,
        tokens_per_second=speed,
        quartiles=[speed, speed, speed],
        peak_memory_bytes=2**20,
        cpu_share=1.0,
        diagnostics=None,
        ramp=ramp and Ramp(1e-3, ramp, ramp * 1e-3, True),
    )
    return Entry(it, Done(run, record if ended else None))


def nats(bits: float) -> float:
    """From base 2 to base e."""
    return bits * math.log(2.0)
