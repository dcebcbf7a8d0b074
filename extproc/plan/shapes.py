"""The shape of a model: what planning needs to know of it, from a model that comes with Baton or from a ``config.json``."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from extproc.plan.dtypes import WEIGHT_BYTES, own_weight_dtype, weight_dtype
from extproc.plan.errors import PlanError
from extproc.plan.parameters import attention_width, count, routed
from extproc.routing.kv_size import kv_bytes_per_token, kv_heads, layer_shares, positive, text_config


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One model."""

    name: str
    parameters: float
    active_parameters: float
    """Those that each token is multiplied with; fewer than all with experts."""
    routed_parameters: float = 0.0
    """Of all, those of routed experts."""
    expert_share: float = 1.0
    """Of a layer's routed experts, how many a token goes to."""
    layers: int
    hidden: int
    config: Mapping[str, Any]

    def kv_bytes_per_token(self, kv_dtype: str = "auto", context_tokens: int | None = None) -> float:
        """KV cache of a token, all layers, as :func:`extproc.routing.kv_size.kv_bytes_per_token`. Raises PlanError."""
        return kv_bytes(self.name, self.config, kv_dtype, context_tokens)

    def weight_dtype(self, dtype: str) -> str:
        """``dtype`` as :func:`extproc.plan.dtypes.weight_dtype` spells it; auto: what the weights come in. Raises PlanError."""
        return own_weight_dtype(self.config) if dtype == "auto" else weight_dtype(dtype)

    def weight_bytes(self, dtype: str) -> float:
        """All weights in ``dtype``, or in their own (auto). Raises PlanError for a format that is not known."""
        return self.parameters * WEIGHT_BYTES[self.weight_dtype(dtype)]

    def kv_copies(self, tensor_parallel: int) -> int:
        """As :func:`kv_copies`."""
        return kv_copies(self.name, self.config, tensor_parallel)

    def prefill_layers(self, context_tokens: int | None) -> float:
        """Layers of full attention that prefilling ``context_tokens`` tokens is worth. Raises PlanError.

        A token of a layer with a window of w sees at most w tokens: over n tokens that is 2w/n - (w/n)^2 of what full
        attention has to do. Layers without attention count nothing.
        """
        try:
            shares = layer_shares(text_config(self.config), context_tokens)
        except ValueError as error:
            raise PlanError(f"{self.name}: {error}") from None
        return sum(2 * share - share**2 for share in shares)


class _Bundled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of ``models/``: numbers of published models, and where they are published."""

    source: str
    hub: tuple[str, ...]
    """Names on the model hub of this model, and of those with the same shape."""
    parameters: float
    config: dict[str, Any]
    active_parameters: float | None = None


def kv_bytes(name: str, config: Mapping[str, Any], kv_dtype: str = "auto", context_tokens: int | None = None) -> float:
    """KV cache of a token of the model ``name``, all layers. Raises PlanError."""
    try:
        return kv_bytes_per_token(config, kv_dtype=kv_dtype, context_tokens=context_tokens)
    except ValueError as error:
        raise PlanError(f"{name}: {error}") from None


def kv_copies(name: str, config: Mapping[str, Any], tensor_parallel: int) -> int:
    """How many of so many GPUs hold the same KV: a head is never cut, and MLA's one vector is whole on each.

    Raises PlanError for a number of GPUs that the model's heads cannot be shared out to.
    """
    try:
        text = text_config(config)
        heads = 1 if text.get("kv_lora_rank") is not None else kv_heads(text)
        queries = positive(text, "num_attention_heads", "n_head")
    except ValueError as error:
        raise PlanError(f"{name}: {error}") from None
    if tensor_parallel < 1:
        raise PlanError(f"GPUs of a worker: at least 1, not {tensor_parallel}")
    if queries % tensor_parallel:
        raise PlanError(f"{name}: {queries} attention heads cannot be shared out to {tensor_parallel} GPUs")
    if heads % tensor_parallel and tensor_parallel % heads:
        raise PlanError(f"{name}: {heads} KV heads cannot be shared out to {tensor_parallel} GPUs")
    return max(1, tensor_parallel // heads)


def model_names() -> list[str]:
    """The models that come with Baton."""
    return sorted(_bundled())


def config_of(name_or_path: str) -> tuple[str, Mapping[str, Any]]:
    """A model's name and ``config.json``: one that comes with Baton, a file, or a folder with one. Raises PlanError."""
    found = _named(name_or_path)
    if found is not None:
        return found[0], found[1].config
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        known = ", ".join(model_names())
        raise PlanError(f"the model {name_or_path!r} is not known, and there is no such file; known are {known}")
    try:
        config = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise PlanError(f"{path}: a JSON object is needed, as models have in config.json")
    return path.parent.resolve().name if path.name == "config.json" else path.stem, config


def shape_of(name_or_path: str, *, parameters: float | None = None, active_parameters: float | None = None) -> Shape:
    """A model by name, or by the path of its ``config.json`` or folder. Raises PlanError.

    ``parameters`` and ``active_parameters`` count more than what is published or can be counted; a model whose layers cannot
    be counted needs them.
    """
    name, config = config_of(name_or_path)
    found = _named(name_or_path)
    try:
        if parameters is None:
            total, active = count(config) if found is None else (found[1].parameters, found[1].active_parameters)
        else:
            total, active = parameters, None
        if active_parameters is not None:
            active = active_parameters
        experts = routed(config)
        attention_width(config)
        text = text_config(config)
        layers, hidden = len(layer_shares(text, None)), positive(text, "hidden_size", "n_embd")
    except ValueError as error:
        raise PlanError(f"{name}: {error}") from None
    active = total if active is None else active
    if not (0 < active <= total and experts.parameters <= total and math.isfinite(total)):
        raise PlanError(
            f"{name}: {active:g} active ones of {total:g} parameters, with {experts.parameters:g} in experts, make no sense"
        )
    return Shape(
        name=name,
        parameters=total,
        active_parameters=active,
        routed_parameters=experts.parameters,
        expert_share=experts.share,
        layers=layers,
        hidden=hidden,
        config=config,
    )


def _named(name: str) -> tuple[str, _Bundled] | None:
    """By our name, or by the one on the hub, whatever the case."""
    lower = name.strip().lower()
    for short, each in _bundled().items():
        names = [name.lower() for name in each.hub]
        if lower in (short, *names, *(name.partition("/")[2] for name in names)):
            return short, each
    return None


@functools.cache
def _bundled() -> Mapping[str, _Bundled]:
    decode = msgspec.json.Decoder(_Bundled).decode
    folder = resources.files("extproc.plan") / "models"
    files = (each for each in folder.iterdir() if each.name.endswith(".json"))
    return {each.name.removesuffix(".json"): decode(each.read_bytes()) for each in files}
