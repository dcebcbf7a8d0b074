"""The shape of a model: what its ``config.json`` says that planning needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import msgspec

from extproc.plan.dtypes import WEIGHT_BYTES, weight_dtype
from extproc.plan.errors import PlanError, unknown
from extproc.routing.kv_size import kv_bytes_per_token


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One model."""

    name: str
    parameters: float
    active_parameters: float
    """Those that a token is multiplied with; fewer than all with experts."""
    layers: int
    hidden: int
    config: Mapping[str, Any]

    def kv_bytes_per_token(self, kv_dtype: str = "auto", context_tokens: int | None = None) -> float:
        """KV cache of a token, all layers, as :func:`extproc.routing.kv_size.kv_bytes_per_token`. Raises PlanError."""
        try:
            return kv_bytes_per_token(self.config, kv_dtype=kv_dtype, context_tokens=context_tokens)
        except ValueError as error:
            raise PlanError(f"{self.name}: {error}") from None

    def weight_bytes(self, dtype: str) -> float:
        """All weights in ``dtype``. Raises PlanError for a format that is not known."""
        return self.parameters * WEIGHT_BYTES[weight_dtype(dtype)]


class _Bundled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    parameters: float
    config: dict[str, Any]
    active_parameters: float | None = None


def model_names() -> list[str]:
    """The models that come with Baton."""
    folder = resources.files("extproc.plan") / "models"
    return sorted(each.name.removesuffix(".json") for each in folder.iterdir() if each.name.endswith(".json"))


def shape_of(name_or_path: str) -> Shape:
    """A model that comes with Baton, by name. Raises PlanError with the names that are known."""
    name = name_or_path.strip().lower()
    if name not in model_names():
        raise unknown("the model", name_or_path, model_names())
    text = (resources.files("extproc.plan") / "models" / f"{name}.json").read_text(encoding="utf-8")
    found = msgspec.json.decode(text, type=_Bundled)
    return Shape(
        name=name,
        parameters=found.parameters,
        active_parameters=found.active_parameters or found.parameters,
        layers=int(found.config["num_hidden_layers"]),
        hidden=int(found.config["hidden_size"]),
        config=found.config,
    )
