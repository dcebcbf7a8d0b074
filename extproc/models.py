"""The names of models: aliases, canaries, and what a client is told about a name that nobody knows."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
import xxhash

from workers.yaml_lines import path_of

_NAME_MAX_CHARS: Final = 256
_MAX_ALIASES: Final = 1024
_MAX_TARGETS: Final = 16
_SHOWN_MODELS: Final = 20
_SHOWN_CHARS: Final = 100


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Raises ValueError when it cannot work; the message may begin with the field."""


class Target(_Section, frozen=True, kw_only=True):
    """One of the models behind an alias."""

    model: str
    """Name under which workers serve it."""
    weight: float = 1.0
    """Its share of the conversations, against the other targets. 0: none."""

    def __post_init__(self) -> None:
        """Raises ValueError."""
        _check_name("model", self.model)
        if not 0 <= self.weight <= 1e6:
            raise ValueError(f"weight: {self.weight:g} is not from 0 to 1000000")


class Models(_Section, frozen=True, kw_only=True):
    """Names of models that clients may use beside those that workers serve."""

    aliases: dict[str, str | list[Target]] = {}
    """Name -> the model served in its place, or several with weights (a canary). The client reads that model's name in the
    answer. See [policies](policies.md)."""
    configs: dict[str, str] = {}
    """Name of a served model -> path of its `config.json`, which says how many bytes a token has in the KV cache, and so what a
    handoff moves. A model without one has `routing.kv_bytes_by_model`, or `routing.kv_bytes_per_token`."""
    kv_dtype: str = "auto"
    """The engines' `--kv-cache-dtype`, for that: `auto` (the model's own), `fp8` and the like."""

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if len(self.aliases) > _MAX_ALIASES:
            raise ValueError(f"aliases: {len(self.aliases)} of them; at most {_MAX_ALIASES} are allowed")
        for name, target in self.aliases.items():
            field = path_of(("aliases", name))
            _check_name(field, name)
            if isinstance(target, str):
                _check_name(field, target)
                if target == name:
                    raise ValueError(f"{field}: it stands for itself")
            names = [each.model for each in _targets(target)]
            if not 1 <= len(names) <= _MAX_TARGETS:
                raise ValueError(f"{field}: {len(names)} models; 1 to {_MAX_TARGETS} are allowed")
            for model in names:
                if names.count(model) > 1:
                    raise ValueError(f"{field}: {model} stands there twice")
                if model != name and model in self.aliases:
                    raise ValueError(f"{field}: {model} is an alias itself; name the model that workers serve")
            if not any(each.weight for each in _targets(target)):
                raise ValueError(f"{field}: all weights are 0")


class Names:
    """From the name in a request to the model that serves it."""

    def __init__(self, models: Models) -> None:
        self._aliases: dict[str, tuple[Target, ...]] = {
            name: tuple(each for each in _targets(target) if each.weight) for name, target in models.aliases.items()
        }

    def resolve(self, name: str, key: str) -> str:
        """The model to serve for ``name``, which is ``name`` itself where it is no alias.

        Of several, the same ``key`` gets the same one, as long as the weights stay; where they change, no more keys move than
        must. So ``key`` is the session, or the tenant where there is none, or else the request id.
        """
        targets = self._aliases.get(name)
        if targets is None:
            return name
        if len(targets) == 1:
            return targets[0].model
        return draw(name, {target.model: target.weight for target in targets}, key)

    def cards(self, served: Mapping[str, bytes]) -> dict[str, bytes]:
        """``served`` (name -> the JSON by which a worker describes the model), and a card for each alias of a served model.

        An alias has the card of its heaviest served target, with its own name as `id`.
        """
        cards = dict(served)
        for name, targets in self._aliases.items():
            known = [target for target in targets if target.model in served]
            if known and name not in served:
                card = _card_decoder.decode(served[max(known, key=lambda target: target.weight).model])
                cards[name] = msgspec.json.encode({**card, "id": name})
        return cards


def unknown_model_message(name: str, known: Iterable[str]) -> str:
    """What a client is told that asks for a model which nobody serves. Of ``known`` at most 20 names are shown."""
    names = sorted(set(known))
    message = f"the model {_short(name)!r} does not exist here"
    if not names:
        return f"{message}; no worker says what it serves"
    if close := difflib.get_close_matches(name[:_NAME_MAX_CHARS], names, 1):
        message += f"; did you mean {_short(close[0])!r}?"
    shown = ", ".join(_short(each) for each in names[:_SHOWN_MODELS])
    more = len(names) - _SHOWN_MODELS
    return f"{message}{'' if close else '.'} Known: {shown}" + (f", and {more} more" if more > 0 else "")


_card_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _targets(target: str | list[Target]) -> list[Target]:
    return [Target(model=target)] if isinstance(target, str) else target


def draw(name: str, weights: Mapping[str, float], key: str) -> str:
    """One of several (name -> weight, above 0), the same for the same ``key``.

    Where weights change, no more keys move than must. ``name`` is that of what is drawn for, so that two draws for one key have
    nothing to do with each other.
    """
    return min(weights, key=lambda each: _lot(name, each, weights[each], key))


def _lot(name: str, target: str, weight: float, key: str) -> float:
    """The target with the least lot gets the key: an exponential variate by hash, as long as the weight is small."""
    drawn = xxhash.xxh3_64_intdigest(f"{name}\0{target}\0{key}".encode())
    return -math.log((drawn + 1) / 2.0**64) / weight


def _check_name(field: str, name: str) -> None:
    if not 0 < len(name) <= _NAME_MAX_CHARS:
        raise ValueError(f"{field}: a name has 1 to {_NAME_MAX_CHARS} characters")


def _short(name: str) -> str:
    return name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}…"
