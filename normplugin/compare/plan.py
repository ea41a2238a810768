"""What is to be trained: the settings that all runs share, and one job per run."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from normplugin.compare.arms import Arm
from normplugin.errors import CompareError, unknown_value
from normplugin.placement import Dims, NormScheme, resolve_scheme
from normplugin.presets import SIZES

FRAMEWORKS = ("fairseq", "megatron")
DEVICES = ("cpu", "cuda")
# --kind -> (kind of the presets, suffix of the architectures of its base size)
KINDS: Mapping[str, tuple[str, str]] = {
    "lm": ("causal_lm", ""),
    "mlm": ("masked_lm", "_mlm"),
    "mt": ("encoder_decoder", "_mt"),
}
_BASE = "base"
_FREE = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)")  # layers x width x heads
FREE = "LAYERSxWIDTHxHEADS (12x64x2)"


@dataclass(frozen=True)
class Settings:
    """What every run shares.

    Attributes:
        framework: One of `FRAMEWORKS`.
        kind: One of `KINDS`.
        size: See `dims_of`.
        updates: Optimizer steps; the learning rate has decayed to zero after the last.
        lrs: Peak learning rates; with a ramp, the one rate reached at the last update.
        seeds: Of the initial weights and of the data order.
        window: Tokens per sequence.
        batch: Sequences per update.
        device: One of `DEVICES`.
        threads: CPU threads of a process.
        nproc: Processes of a run.
        tp: Tensor-parallel processes.
        pp: Pipeline stages.
        ramp: Let the learning rate grow to the end instead of decaying.
        validations: How often the validation text is scored along a run, with a checkpoint each.
        diagnostics: Updates between two records of the diagnostics; 0 for none.
        extra: Further words of every trainer's command line.
    """

    framework: str = "fairseq"
    kind: str = "lm"
    size: str = "tiny"
    updates: int = 300
    lrs: tuple[float, ...] = (2e-3,)
    seeds: tuple[int, ...] = (1,)
    window: int = 128
    batch: int = 16
    device: str = "cpu"
    threads: int = 1
    nproc: int = 1
    tp: int = 1
    pp: int = 1
    ramp: bool = False
    validations: int = 10
    diagnostics: int = 0
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("updates", "window", "batch", "threads", "nproc", "tp", "pp", "validations"):
            least = 2 if name == "updates" else 1
            value = getattr(self, name)
            _require(f"--{name}", value, value >= least, f"an integer >= {least}")
        for name, values in (("lr", self.lrs), ("seeds", self.seeds)):
            _require(f"--{name}", values, len(values) == len(set(values)) > 0, "each value once")
        for seed in self.seeds:
            _require("--seeds", seed, seed >= 1, "integers >= 1")
        for rate in self.lrs:
            legal = rate > 0.0 and (rate < 1.0 or self.ramp)
            _require("--lr", rate, legal, "0 < value < 1")
        _require("--diagnostics-interval", self.diagnostics, self.diagnostics >= 0, ">= 0")
        self._check_framework()
        self.dims()

    def _check_framework(self) -> None:
        if self.framework == "megatron" and self.kind != "lm":
            raise CompareError(
                f"--kind: got {self.kind} with --framework megatron; legal is lm, the one model "
                "of its GPT trainer. Take --kind lm, or --framework fairseq."
            )
        if self.framework == "fairseq" and self.nproc * self.tp * self.pp > 1:
            raise CompareError(
                f"--nproc, --tp, --pp: got {self.nproc}, {self.tp}, {self.pp} with --framework "
                "fairseq; legal is 1 process. Drop them, or take --framework megatron."
            )
        if self.nproc % (self.tp * self.pp) or self.batch % self.data_parallel:
            raise CompareError(
                f"--nproc: got {self.nproc} with --tp {self.tp} --pp {self.pp} --batch "
                f"{self.batch}; tp x pp must divide it, and the rest the batch. Change one of them."
            )

    def dims(self) -> Dims:
        """Return the sizes of the model; raise `CompareError` for an unknown size."""
        return dims_of(self.kind, self.size)

    @property
    def data_parallel(self) -> int:
        """Processes that each have a part of the batch."""
        return max(1, self.nproc // (self.tp * self.pp))

    @property
    def tokens(self) -> int:
        """Token budget of a run, where the batches are full."""
        return self.updates * self.window * self.batch

    @property
    def log_interval(self) -> int:
        """Updates between two lines of the training log."""
        return max(1, min(10, self.updates // 20))

    @property
    def valid_interval(self) -> int:
        """Updates between two validations, with a checkpoint each.

        At least two log intervals, so that some hold no validation and measure the speed.
        """
        wanted = self.validations * self.log_interval
        return max(2, -(-self.updates // wanted)) * self.log_interval

    @property
    def warm_up(self) -> int:
        """Updates until the learning rate is at its peak."""
        return self.updates if self.ramp else max(1, self.updates // 10)

    def shared(self) -> dict[str, object]:
        """Return what all runs of a folder share: not the rates and seeds, which may grow."""
        return {f"--{k}": v for k, v in dataclasses.asdict(self).items() if k not in _PER_RUN}

    def promised_parameters(self, arm: Arm) -> int:
        """Return the parameters that an arm has more than the baseline, by the scheme's formula."""
        if arm.placement is None:
            return 0
        return self._norm_parameters(arm.placement) - self._norm_parameters(resolve_scheme("preln"))

    def _norm_parameters(self, scheme: NormScheme) -> int:
        dims = self.dims()
        stacks = (
            (False, True) if self.kind == "mt" else (False,)
        )  # whether there is cross-attention
        return sum(
            dims.n_layers * sum(scheme.count(site, dims) for site in scheme.layer_sites(cross))
            + sum(scheme.count(site, dims) for site in scheme.stack_sites())
            for cross in stacks
        )


_PER_RUN = frozenset({"lrs", "seeds"})


@dataclass(frozen=True)
class Job:
    """One run to be: an arm at a learning rate with a seed, in a folder of its own."""

    arm: Arm
    lr: float
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        """What progress and messages call it."""
        return f"{self.arm.name} lr {self.lr:g} seed {self.seed}"


def jobs(arms: Sequence[Arm], settings: Settings, out: Path) -> Iterator[Job]:
    """Yield a job per arm, learning rate and seed; the first rate and seed of all arms first."""
    for seed, lr, arm in itertools.product(settings.seeds, settings.lrs, arms):
        yield Job(arm, lr, seed, out.resolve() / "runs" / arm.folder / f"lr{lr:g}_seed{seed}")


def sizes(kind: str) -> list[str]:
    """Return the names of the sizes of a kind."""
    suffix = KINDS[kind][1]
    return [name.removeprefix(suffix).removeprefix("_") or _BASE for name in SIZES[KINDS[kind][0]]]


def dims_of(kind: str, size: str) -> Dims:
    """Return the dimensions of a size: one of `sizes`, or free ones such as ``12x64x2``.

    Raises:
        CompareError: An unknown name, or a width that the heads do not divide.
    """
    free = _FREE.fullmatch(size)
    if free:
        layers, width, heads = map(int, free.groups())
        _require("--size", size, width % heads == 0, "a width that the heads divide")
        return Dims(layers, width, 4 * width, heads)
    known = sizes(kind)
    if size not in known:
        raise CompareError(unknown_value("--size", size, known, f"{', '.join(known)}, or {FREE}"))
    presets, suffix = KINDS[kind]
    return SIZES[presets][suffix + ("" if size == _BASE else f"_{size}")]


def _require(what: str, value: object, legal: bool, legal_values: str) -> None:
    if not legal:
        raise CompareError(f"{what}: got {value}; legal is {legal_values}. Change it.")
