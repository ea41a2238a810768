"""What a checkpoint says about its architecture, and the check before it is loaded.

The card (scheme, sizes, kind) travels as a buffer in the model's state: whatever copies, averages,
shards or converts a fairseq checkpoint keeps it, and no config format has to know about it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from normplugin.errors import CheckpointError
from normplugin.placement import Dims, NormScheme, NormSpec, architecture_hash, resolve_scheme

logger = logging.getLogger(__name__)
BUFFER = "norm_card"
_UPSTREAM = resolve_scheme("preln").identity()


@dataclass(frozen=True)
class Card:
    """A model's architecture: what `architecture_hash` covers."""

    scheme: NormScheme
    dims: Dims
    kind: str

    @property
    def hash(self) -> str:
        """The architecture hash."""
        return architecture_hash(self.scheme, self.dims, self.kind)

    def encode(self) -> Tensor:
        """Return the card as a 1-D int64 tensor of UTF-8 bytes.

        Integers survive fp16 conversion, and int64 sums do not overflow when checkpoints are
        averaged.
        """
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return torch.tensor(list(text.encode()), dtype=torch.int64)

    @staticmethod
    def decode(encoded: Tensor) -> Card:
        """Invert `encode`; raise `CheckpointError` for anything else."""
        try:
            card = json.loads(bytes(encoded.tolist()).decode())
            scheme = card["scheme"]
            norm = NormSpec(**scheme.pop("norm"))
            return Card(NormScheme(norm=norm, **scheme), Dims(**card["dims"]), card["kind"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"checkpoint: its architecture card cannot be read ({error}). "
                "It is damaged, or written by a newer normplugin; update normplugin."
            ) from None


def add_card(module: nn.Module, card: Card) -> None:
    """Store the card in a module's state."""
    module.card = card  # type: ignore[assignment]
    module.register_buffer(BUFFER, card.encode())


def find_card(state: Mapping[str, Tensor]) -> Card | None:
    """Return the card in a model state, or None where there is none."""
    for name, value in state.items():
        if name.rpartition(".")[2] == BUFFER:
            return Card.decode(value)
    return None


def check_state(module: nn.Module, state: dict[str, Tensor], prefix: str) -> None:
    """Check a state against the card of the module it is meant for, before it is loaded.

    The number of layers is not compared: fairseq prunes layers while loading, and its strict
    loading names layers that are missing.

    Raises:
        CheckpointError: Another scheme, norm, width or kind; or no card in a state that upstream's
            Pre-LN model cannot have written.
    """
    own: Card = module.card  # type: ignore[assignment]
    key = f"{prefix}.{BUFFER}"
    difference = _difference(own, Card.decode(state[key]) if key in state else None)
    if difference:
        # fairseq's trainer replaces the exception's text, so that it has to be logged as well.
        logger.error(difference)
        raise CheckpointError(difference)
    state[key] = module.get_buffer(BUFFER)


def _difference(own: Card, theirs: Card | None) -> str | None:
    if theirs is None:
        if own.scheme.identity() == _UPSTREAM:
            return None
        return (
            f"checkpoint: it holds no architecture card, so upstream's model wrote it; the model "
            f"is {own.scheme.name!r}. Only 'preln' with the default norm loads such a file."
        )
    ours, other = _comparable(own), _comparable(theirs)
    names = [name for name in ours if ours[name] != other[name]]
    if not names:
        return None
    details = "; ".join(f"{name} {other[name]} in the file, {ours[name]} here" for name in names)
    return (
        f"checkpoint: scheme {theirs.scheme.name!r} does not fit the model's "
        f"{own.scheme.name!r}: {details}. Take the options it was trained with."
    )


def _comparable(card: Card) -> dict[str, object]:
    identity = card.scheme.identity()
    del identity["output_norm_init"]  # where training started, not what is computed
    dims = dataclasses.asdict(card.dims)
    del dims["n_layers"]
    return {**identity, **dims, "kind": card.kind}


def load(path: str | Path, trust: bool = False) -> dict:
    """Return a fairseq checkpoint on the CPU, under any torch.

    Args:
        path: The file.
        trust: Allow the file to run code while it is read. fairseq's own files need it only when
            they hold more than tensors and plain values.

    Raises:
        CheckpointError: Missing, damaged, sharded or not trusted.
    """
    path = Path(path)
    if "-shard" in path.name:
        raise CheckpointError(
            f"{path.name}: got one shard of a sharded checkpoint; whole ones are legal. "
            "Consolidate the shards with fairseq's fairseq.checkpoint_utils first."
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=not trust)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: got no such file. Check the path.") from None
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{path}: it cannot be read as a checkpoint ({reason}). It is damaged or cut short; "
            "if it is your own and holds Python objects, say --trust."
        ) from None
