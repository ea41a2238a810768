"""fairseq's own trainer on models of every kind: its features work as on its own models."""

from __future__ import annotations

import copy

import pytest
import torch
from fairseq.optim.fp16_optimizer import FP16Optimizer, MemoryEfficientFP16Optimizer
from fairseq.trainer import Trainer
from fairseq_builders import parse
from hydra_builders import built, task_of
from kinds import SOURCE, TARGET
from omegaconf import OmegaConf

from normplugin.placement import KINDS

PAD = 1
TASK = {"causal_lm": "language_modeling", "masked_lm": "masked_lm"}
CRITERION = {"masked_lm": ["--criterion", "masked_lm", "--max-positions", "64"]}
ARCH = {"causal_lm": "_tiny", "masked_lm": "_mlm_tiny", "encoder_decoder": "_mt_tiny"}
ADAM = ["--optimizer", "adam", "--lr", "1e-1"]
NO_DROPOUT = ["--dropout", "0", "--attention-dropout", "0"]


def config(kind: str, scheme: str, *options: str):
    words = ["--task", TASK.get(kind, "translation"), *CRITERION.get(kind, [])]
    words += ["--arch", scheme + ARCH[kind], *NO_DROPOUT, "--cpu", "--clip-norm", "0"]
    words += ["--ddp-backend", "legacy_ddp"]
    return parse(*words, "--optimizer", "sgd", "--lr", "0.5", "--log-format", "none", *options)


def trainer(cfg):
    """fairseq's trainer with the model of a config."""
    task, model = task_of(cfg), built(cfg)
    return Trainer(cfg, task, model, task.build_criterion(cfg.criterion))


def batch(kind: str, rows=slice(None)) -> dict:
    """A batch as the kind's task makes it, without padding, so that rows weigh the same."""
    tokens = SOURCE.roll(1, 0)[rows].where(SOURCE[rows] != PAD, torch.tensor(7))
    inputs = {"src_tokens": tokens, "src_lengths": torch.full((len(tokens),), tokens.size(1))}
    target = tokens.roll(-1, 1)
    if kind == "masked_lm":
        target = target.where(torch.arange(7) % 2 == 0, torch.tensor(PAD))
    if kind == "encoder_decoder":
        target = TARGET[rows].where(TARGET[rows] != PAD, torch.tensor(7))
        inputs["prev_output_tokens"] = target.roll(1, 1)
    return {
        "id": torch.arange(len(tokens)), "nsentences": len(tokens), "net_input": inputs,
        "ntokens": int(target.ne(PAD).sum()), "target": target,
    }  # fmt: skip


def parameters(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def evaluated(run, kind: str) -> float:
    """The criterion's loss of a batch, without dropout and noise."""
    return float(run.criterion.eval()(run.model.eval(), batch(kind))[0])


@pytest.mark.parametrize("kind", KINDS)
def test_update_freq(kind):
    """Two half batches accumulated give the update of the whole batch."""
    one, two = (trainer(config(kind, "normformer", "--residual-scale")) for _ in range(2))
    before = parameters(one.model)
    one.train_step([batch(kind)])
    two.train_step([batch(kind, slice(0, 1)), batch(kind, slice(1, 2))])
    after = parameters(two.model)
    for name, value in parameters(one.model).items():
        assert "bias" in name or "embed" in name or not torch.equal(value, before[name]), name
        torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-6)


def on_one_rank(rank: int, folder: str) -> None:
    """Take an update of each kind as one of two processes, each with half of the batch."""
    rendezvous = {"init_method": f"file://{folder}/rendezvous", "rank": rank, "world_size": 2}
    torch.distributed.init_process_group("gloo", **rendezvous)
    two = ["--distributed-world-size", "2", "--distributed-rank", str(rank)]
    for kind in KINDS[1:]:
        run = trainer(config(kind, "normformer", "--residual-scale", *two))
        run.train_step([batch(kind, slice(rank, rank + 1))])
        if rank == 0:
            torch.save(parameters(run._model), f"{folder}/{kind}.pt")


def test_two_processes(tmp_path):
    """Two gloo processes give the update of one; test_training.py has the causal model."""
    torch.multiprocessing.spawn(on_one_rank, (str(tmp_path),), nprocs=2)
    for kind in KINDS[1:]:
        run = trainer(config(kind, "normformer", "--residual-scale"))
        run.train_step([batch(kind)])
        two = torch.load(tmp_path / f"{kind}.pt", weights_only=True)
        for name, value in parameters(run.model).items():
            torch.testing.assert_close(two[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scheme", ["periln", "normformer"])
@pytest.mark.parametrize("kind", KINDS)
def test_ema(kind, scheme):
    """The average holds half the start and half the first update, norms and scales included."""
    options = ["--residual-scale", "--store-ema", "--ema-decay", "0.5"]
    untied = ["--untie-weights-roberta"] * (kind == "masked_lm")  # fairseq averages tied ones twice
    run = trainer(config(kind, scheme, *options, *untied))
    run.ema  # noqa: B018  (built on first use, as the trainer does before it loads)
    before = parameters(run.model)
    run.train_step([batch(kind)])
    after, average = parameters(run.model), parameters(run.ema.get_model())
    assert list(average) == list(after)
    for name, value in average.items():
        torch.testing.assert_close(value, (before[name] + after[name]) / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scheme", ["periln", "normformer", "outputln"])
@pytest.mark.parametrize("kind", KINDS[1:])  # test_training.py has the causal one
def test_memory_efficient_fp16(kind, scheme):
    """The loss is fp32's within half precision, and the update stays finite."""
    options = [*ADAM, "--fp16-init-scale", "4"]
    full, half = (
        trainer(config(kind, scheme, *options, *o)) for o in ([], ["--memory-efficient-fp16"])
    )
    assert {p.dtype for p in half.model.parameters()} == {torch.float16}
    assert evaluated(half, kind) == pytest.approx(evaluated(full, kind), rel=0.02)
    half.train_step([batch(kind)])
    assert half.get_num_updates() == 1
    assert all(p.isfinite().all() for p in half.model.parameters())


@pytest.mark.parametrize("flags", ["--fp16", "--bf16", "--bf16 --memory-efficient-bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_optimizers(kind, flags):
    """Every parameter is in the optimizer and moves; fairseq's trainer wants a GPU before that."""
    options = [*ADAM, "--fp16-no-flatten-grads", "--fp16-init-scale", "4"]
    cfg = config(kind, "normformer", *options, *flags.split(), "--residual-scale")
    model = built(cfg).to(torch.float16 if flags == "--fp16" else torch.bfloat16)
    params = list(model.parameters())
    cls = MemoryEfficientFP16Optimizer if "memory" in flags else FP16Optimizer
    optimizer = cls.build_optimizer(cfg, params)
    before = parameters(model)
    optimizer.zero_grad()
    optimizer.backward(sum(p.float().sum() for p in params))
    optimizer.step()
    for name, value in parameters(model).items():
        assert not torch.equal(value, before[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_composite_optimizer(kind):
    """A composite of one group does what its optimizer does alone."""
    cfg = config(kind, "normformer", *ADAM)
    plain = trainer(copy.deepcopy(cfg))
    OmegaConf.set_struct(cfg, False)
    group = {
        name: OmegaConf.to_container(cfg[name], resolve=True)
        for name in ("optimizer", "lr_scheduler")
    }
    group |= {"lr": cfg.optimization.lr, "lr_float": None}  # 0.12.2 reads these
    cfg.optimizer = {"_name": "composite", "groups": {"default": group}}
    cfg.lr_scheduler = {"_name": "pass_through"}
    cfg.common.fp16_no_flatten_grads = True
    composite = trainer(cfg)
    for run in (plain, composite):
        run.train_step([batch(kind)])
    found = parameters(composite.model)
    for name, value in parameters(plain.model).items():
        torch.testing.assert_close(found[name], value)


ADAPTIVE = "--adaptive-softmax-cutoff 20,40 --criterion adaptive_loss"
LAYOUTS = {
    "causal_lm": [
        "--share-decoder-input-output-embed",
        "--quant-noise-pq 0.5",
        ADAPTIVE,
        f"{ADAPTIVE} --adaptive-input --adaptive-input-cutoff 20,40 --tie-adaptive-weights "
        "--tie-adaptive-proj",
    ],
    "masked_lm": ["--untie-weights-roberta", "--quant-noise-pq 0.5"],
    "encoder_decoder": [
        "--share-all-embeddings",
        "--quant-noise-pq 0.5",
        "--share-decoder-input-output-embed",
        ADAPTIVE,
    ],
}
UPSTREAM = {
    "causal_lm": "transformer_lm_gpt",
    "masked_lm": "roberta_prenorm",
    "encoder_decoder": "transformer",
}


@pytest.mark.parametrize(
    ("kind", "options"), [(kind, line) for kind, lines in LAYOUTS.items() for line in lines]
)
def test_first_update(kind, options):
    """preln's first update is upstream's, bit for bit; periln moves whatever upstream's moves."""
    preln = config(kind, "preln", *options.split())
    upstream = copy.deepcopy(preln)
    upstream.model._name = UPSTREAM[kind]
    runs = [
        trainer(preln),
        trainer(upstream),
        trainer(config(kind, "periln", *options.split())),
    ]
    starts = [parameters(run.model) for run in runs]
    for run in runs:
        run.train_step([batch(kind)])
    mine, theirs, normed = (parameters(run.model) for run in runs)
    for name, value in mine.items():
        assert torch.equal(starts[0][name], starts[1][name]) and torch.equal(value, theirs[name])
    still = {name for name, value in normed.items() if torch.equal(value, starts[2][name])}
    assert still <= {name for name, value in theirs.items() if torch.equal(value, starts[1][name])}
