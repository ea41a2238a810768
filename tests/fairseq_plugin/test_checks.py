"""What cannot work is refused before any data is loaded, by name and with advice."""

from __future__ import annotations

import pytest
from fairseq.data import Dictionary
from fairseq.tasks import FairseqTask
from fairseq.tasks.masked_lm import MaskedLMTask
from fairseq_builders import build_model, parse

from normplugin.errors import SchemeError
from normplugin.fairseq_plugin.checks import check_task
from normplugin.fairseq_plugin.models import NormLanguageModel

REFUSED = {
    "--arch normformer --task masked_lm": (
        "--task: got 'masked_lm' with --arch normformer, a causal language model; legal is "
        "--task language_modeling. Take that task, or --arch normformer_mlm."
    ),
    "--arch periln_tiny --task translation": "or --arch periln_mt_tiny",
    "--arch preln_355m --task sentence_prediction --num-classes 2": "or --arch preln_mlm_large",
    "--arch periln_mlm --task language_modeling": "or --arch periln[.]",
    "--arch postln_mlm_tiny --task translation": "or --arch postln_mt_tiny",
    "--arch outputln_mt --task masked_lm": "an encoder-decoder; legal is --task translation",
    "--arch periln_mt --task audio_pretraining": "legal is --task translation. Take that task[.]",
    "--arch postln_mlm --task masked_lm --encoder-normalize-before": "after the residual add",
    "--arch postln_mt_tiny --task translation --decoder-normalize-before": "--decoder-normalize",
    "--arch preln_mlm_tiny --task masked_lm --layernorm-embedding": "Take --embedding-norm",
    "--arch preln_mt_tiny --task translation --no-cross-attention": "removes a sublayer",
    "--arch preln_mt_tiny --task translation --cross-self-attention": "merges two sublayers",
    "--arch preln_mt_tiny --task translation --encoder-attention-heads 3": "--encoder-embed-dim",
    "--arch normformer_mt_tiny --task translation --quant-noise-pq 0.1": "overwrites the weight",
    "--arch normformer_mlm --task masked_lm --mha-heads-to-keep 2": "pruning knows no norm",
    "--arch outputln_mt --task translation --encoder-xformers-att-config {}": "past the QK-norm",
    "--arch normformer_tiny --norm-scheme periln": "whose name promises 'normformer'",
    "--arch preln_tiny --norm-scheme perilm": "Did you mean 'periln'",
    "--arch periln_tiny --norm-type rms": "--norm-type: got 'rms'",
    "--arch preln_tiny --output-norm-init 0.1": "has no output norm",
    "--arch preln_tiny --scale-attn": "--scale-attn: got True .* does nothing in fairseq",
    "--arch normformer_tiny --scale-heads": "Take --head-scale after-out-proj",
    "--arch normformer_tiny --scale-fc": "--scale-fc",
    "--arch normformer_tiny --scale-resids": "Take --residual-scale",
    "--arch preln_tiny --layernorm-embedding": "Take --embedding-norm",
    "--arch preln_tiny --no-decoder-final-norm": "The scheme decides",
    "--arch postln_tiny --decoder-normalize-before": "normalises after the residual add",
    "--arch preln_tiny --base-layers 1": "BASE layers",
    "--arch preln_tiny --decoder-attention-heads 3": "must divide --decoder-embed-dim 128",
    "--arch normformer_tiny --quant-noise-pq 0.1": "overwrites the weight",
    "--arch periln_tiny --quant-noise-scalar 0.1": "replaces the linears",
    "--arch outputln_tiny --decoder-xformers-att-config {}": "past the QK-norm",
    "--arch periln_tiny --recompute-ffn-norm": "has no FFN hidden norm",
    "--arch normformer_tiny --recompute-ffn-norm --activation-dropout 0.1": "cannot be rebuilt",
}


@pytest.mark.parametrize(("line", "message"), REFUSED.items())
def test_refused_on_the_command_line(line, message):
    """The parser ends with one sentence, as it does for its own errors."""
    task = [] if "--task" in line else ["--task", "language_modeling"]
    with pytest.raises(SystemExit, match=message):
        parse(*task, *line.split())


def test_the_command_ends_with_one_line(fairseq, tmp_path):
    """``fairseq-train`` prints the sentence without a traceback and reads no data."""
    done = fairseq(
        "train", tmp_path / "nothing", "--arch", "normformer", "--task", "masked_lm", ok=False
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("normplugin: error: --task: got")
    assert "Traceback" not in done.stderr


def test_refused_without_the_parser():
    """The same rules hold for a config that never met the parser (hydra, library use)."""
    cfg = parse("--task", "language_modeling", "--arch", "preln_tiny").model
    cfg.scale_attn = True
    from fairseq.tasks.language_modeling import LanguageModelingTask

    task = LanguageModelingTask(
        parse("--task", "language_modeling", "--arch", "preln_tiny").task,
        Dictionary(),
        Dictionary(),
    )
    with pytest.raises(SchemeError, match="--scale-attn: got True"):
        NormLanguageModel.build_model(cfg, task)
    other = MaskedLMTask(parse("--task", "masked_lm", "--arch", "preln_mlm").task, Dictionary())
    cfg = parse("--task", "language_modeling", "--arch", "preln_tiny").model
    with pytest.raises(SchemeError, match=r"'masked_lm' with a causal .* --arch ending in _mlm"):
        NormLanguageModel.build_model(cfg, other)


def test_tasks_from_outside():
    """A plugin's own task is taken unless it extends the task of another kind."""

    class Foreign(FairseqTask):
        pass

    class ForeignMasked(MaskedLMTask):
        pass

    check_task(Foreign, "masked_lm")
    check_task(ForeignMasked, "masked_lm")
    with pytest.raises(SchemeError, match="got 'ForeignMasked' with an encoder-decoder"):
        check_task(ForeignMasked, "encoder_decoder")


@pytest.mark.parametrize(
    "line",
    [
        "--arch preln_tiny --decoder-normalize-before",
        "--arch periln_tiny --norm-scheme periln",
        "--arch periln_tiny --quant-noise-pq 0.1",
        "--arch preln_tiny --quant-noise-scalar 0.1",
        "--arch normformer_tiny --activation-dropout 0.1",
        "--arch normformer_tiny --adaptive-softmax-cutoff 20,40 --criterion adaptive_loss",
        "--arch periln_tiny --adaptive-input --adaptive-input-cutoff 20,40",
        "--arch periln_tiny --adaptive-input --adaptive-input-cutoff 20,40 --tie-adaptive-weights "
        "--adaptive-softmax-cutoff 20,40 --criterion adaptive_loss",
        "--arch outputln_tiny --decoder-layerdrop 0.2 --decoder-learned-pos",
        "--arch normformer_tiny --character-embeddings --activation-fn relu_squared",
    ],
)
def test_legal_mixes_build(line):
    """Upstream options that fit a scheme stay usable, and no promise is broken."""
    build_model(*line.split())
