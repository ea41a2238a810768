"""What a manifest says about one run."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata

import normplugin
from normplugin.data import manifest, vocabulary
from normplugin.data.corpus import Corpus
from normplugin.data.encode import Encoded
from normplugin.data.manifest import Manifest
from normplugin.data.settings import PrepareSettings
from normplugin.data.tokenizer import Tokenizer
from normplugin.data.vocabulary import Vocabulary

_POLICY = "every document ends with eos; none begins with bos; eos is counted in tokens"


@dataclasses.dataclass(frozen=True)
class Identity:
    """What decides the bytes of a result: equal identities, equal files."""

    settings: dict[str, object]
    corpus: dict[str, object]
    versions: dict[str, str]

    def differences(self, earlier: Manifest) -> list[str]:
        """Return the names of what an earlier result was prepared with otherwise."""
        names = [key for key, value in self.settings.items() if earlier.settings.get(key) != value]
        names += ["text"] if earlier.corpus != self.corpus else []
        return names + (["versions"] if earlier.versions != self.versions else [])


def identity(settings: PrepareSettings, given: Tokenizer | None, corpus: Corpus) -> Identity:
    """Return the identity of a run; a given tokenizer counts by its bytes."""
    chosen = settings.record()
    if given is not None:
        chosen["tokenizer"] = {"given": hashlib.sha256(given.model).hexdigest()}
    versions = {
        "normplugin": normplugin.__version__,
        "sentencepiece": importlib.metadata.version("sentencepiece"),
    }
    text = {**dataclasses.asdict(corpus.fingerprint()), **corpus.facts}
    return Identity(chosen, text, versions)


def build(
    run: Identity, used: Tokenizer, ids: Vocabulary, encoded: Encoded, files: dict[str, str]
) -> Manifest:
    """Return the manifest of a finished run."""
    lines = dataclasses.asdict(used.lines) if used.lines else None
    return Manifest(
        format=manifest.FORMAT,
        versions=run.versions,
        corpus=run.corpus,
        settings=run.settings,
        documents=_POLICY,
        tokenizer={"pieces": ids.pieces, "lines": lines},
        ids=_ids(used, ids),
        vocabulary={"fairseq_rows": ids.fairseq_rows, "megatron_padded": ids.megatron_padded},
        splits=encoded.splits,
        files=files,
    )


def _ids(used: Tokenizer, ids: Vocabulary) -> dict[str, object]:
    mask = used.processor.piece_to_id(vocabulary.MASK)
    return {
        "offset": ids.offset,
        "eos": ids.eos,
        "unk": ids.unk,
        "specials": {str(key): value for key, value in sorted(ids.specials.items())},
        "mask_piece": None if mask == ids.unk else mask,
    }
