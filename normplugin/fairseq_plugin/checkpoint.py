"""What a checkpoint says about its architecture, and the check before it is loaded.

The card (scheme, sizes, kind) travels as a buffer in the state of each encoder and decoder:
whatever copies, averages, shards or converts a fairseq checkpoint keeps it, and no config format
has to know about it.
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
from normplugin.fairseq_plugin.sites import Shapes, promised
from normplugin.placement import Dims, NormScheme, NormSpec, architecture_hash, resolve_scheme

logger = logging.getLogger(__name__)
BUFFER = "norm_card"
EXEMPT_OPTIMIZER = "adam_decay_exempt"
_UPSTREAM = resolve_scheme("preln").identity()


@dataclass(frozen=True)
class Card:
    """The architecture of a stack: what `architecture_hash` covers."""

    scheme: NormScheme
    dims: Dims
    kind: str

    @property
    def hash(self) -> str:
        """The architecture hash."""
        return architecture_hash(self.scheme, self.dims, self.kind)

    def encode(self) -> Tensor:
        """Return the card and its hash as the bits of UTF-8 text, a 1-D tensor of 0.0 and 1.0.

        Half precision keeps them, and so does averaging, of checkpoints or by EMA: zero stays zero
        and one stays positive. (fairseq's EMA cannot average integers.)
        """
        text = json.dumps({**dataclasses.asdict(self), "hash": self.hash}, sort_keys=True)
        return to_bits(text)

    @staticmethod
    def decode(encoded: Tensor) -> Card:
        """Invert `encode`; raise `CheckpointError` for anything else."""
        try:
            fields = json.loads(to_text(encoded))
            scheme = fields["scheme"]
            norm = NormSpec(**scheme.pop("norm"))
            card = Card(NormScheme(norm=norm, **scheme), Dims(**fields["dims"]), fields["kind"])
            if card.hash != fields["hash"]:
                raise ValueError(f"its hash is {fields['hash']}, its content's {card.hash}")
            return card
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"checkpoint: its architecture card cannot be read ({error}). "
                "It is damaged, or written by a newer normplugin; update normplugin."
            ) from None


def to_bits(text: str) -> Tensor:
    """Return the bits of a text, the lowest of each byte first."""
    octets = torch.tensor(list(text.encode()))
    return (octets[:, None] >> torch.arange(8) & 1).flatten().float()


def to_text(bits: Tensor) -> str:
    """Invert `to_bits`."""
    octets = ((bits > 0).reshape(-1, 8) << torch.arange(8)).sum(1)
    return bytes(octets.tolist()).decode()


def add_card(module: nn.Module, card: Card) -> None:
    """Store the card in a module's state."""
    module.card = card  # type: ignore[assignment]
    module.register_buffer(BUFFER, card.encode())


def find_cards(state: Mapping[str, Tensor]) -> dict[str, Card]:
    """Return the path of every stack in a model state that has a card, with its card."""
    names = [name for name in state if name.rpartition(".")[2] == BUFFER]
    return {name.rpartition(".")[0]: Card.decode(state[name]) for name in names}


def promised_by(cards: Mapping[str, Card]) -> Shapes:
    """Return name -> shape of every norm and scale parameter that cards promise."""
    shapes: Shapes = {}
    for path, card in cards.items():
        cross = card.kind == "encoder_decoder" and path.endswith("decoder")
        shapes |= promised(card.scheme, card.dims, path, cross)
    return shapes


def check_state(module: nn.Module, state: dict[str, Tensor], prefix: str) -> None:
    """Check a state against the card of the module it is meant for, before it is loaded.

    The number of layers is not compared: fairseq prunes layers while loading, and its strict
    loading names layers that are missing.

    Raises:
        CheckpointError: Another scheme, norm, width, kind or vocabulary; or no card in a state that
            upstream's Pre-LN model cannot have written.
    """
    own: Card = module.card  # type: ignore[assignment]
    key = f"{prefix}.{BUFFER}"
    cards = find_cards(state)
    foreign = next((card for card in cards.values() if card.kind != own.kind), None)
    difference = _difference(own, cards.get(prefix) or foreign)
    difference = difference or _vocabulary(module, state.get(f"{prefix}.embed_tokens.weight"))
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


def _vocabulary(module: nn.Module, theirs: Tensor | None) -> str | None:
    own = getattr(module.embed_tokens, "weight", None)  # adaptive inputs have none
    if own is None or theirs is None or len(own) == len(theirs):
        return None
    return (
        f"checkpoint: its vocabulary has {len(theirs)} entries, the data's {len(own)}. "
        "Take data prepared with the checkpoint's tokenizer and dictionary, or another --save-dir."
    )


def _comparable(card: Card) -> dict[str, object]:
    dims = dataclasses.asdict(card.dims)
    del dims["n_layers"]
    return {**card.scheme.identity(), **dims, "kind": card.kind}


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
    try:
        file = torch.load(path, map_location="cpu", weights_only=not trust)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: got no such file. Check the path.") from None
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{path}: it cannot be read as a checkpoint ({reason}). It is damaged or cut short; "
            "if it is your own and holds Python objects, say --trust."
        ) from None
    if "-shard" in path.name or "fsdp_metadata" in file:
        raise CheckpointError(
            f"{path.name}: got one shard of a sharded checkpoint; whole ones are legal. "
            "Consolidate the shards with fairseq's fairseq.checkpoint_utils first, or train "
            "without --use-sharded-state."
        )
    return file


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint promises and what it holds.

    Attributes:
        cards: The architecture of each stack.
        missing: Promised parameters that are not there, or have another shape.
        parameters: Number of parameters stored.
        updates: Number of updates trained.
        optimizer: fairseq's name of the optimizer.
        weight_decay: The configured weight decay.
    """

    cards: dict[str, Card]
    missing: list[str]
    parameters: int
    updates: int | None
    optimizer: str | None
    weight_decay: float | None

    def facts(self) -> dict[str, object]:
        """Plain values for a report."""
        decay = "no weight decay"
        if self.weight_decay:
            spared = self.optimizer == EXEMPT_OPTIMIZER
            decay = f"{self.weight_decay}, norms and scales {'spared' if spared else 'decayed too'}"
        return {
            "parameters_stored": self.parameters,
            "updates": self.updates,
            "weight_decay": decay,
            "promised_norms": "all there" if not self.missing else "NOT all there",
            "missing": self.missing,
        }


def inspect(path: str | Path, trust: bool = False) -> Inspection:
    """Read a checkpoint written by one of our models.

    Raises:
        CheckpointError: As `load`; also for a checkpoint without a card.
    """
    file = load(path, trust)
    state = file.get("model", {})
    cards = find_cards(state)
    if not cards:
        raise CheckpointError(
            f"{path}: it holds no architecture card; only checkpoints of normplugin's "
            "architectures do. Describe the scheme or architecture by name instead."
        )
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    wanted = promised_by(cards)
    optimizer = (file.get("cfg") or {}).get("optimizer") or {}
    return Inspection(
        cards=cards,
        missing=sorted(name for name, shape in wanted.items() if shapes.get(name) != shape),
        parameters=sum(value.numel() for name, value in state.items() if BUFFER not in name),
        updates=(file.get("optimizer_history") or [{}])[-1].get("num_updates"),
        optimizer=optimizer.get("_name"),
        weight_decay=optimizer.get("weight_decay"),
    )
