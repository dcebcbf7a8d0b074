"""How many bytes of KV cache a token of each model has: from the models' `config.json` where the configuration names one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from extproc.config import Config, ConfigError
from extproc.routing.kv_size import kv_bytes_per_token
from extproc.routing.settings import Routing


def routing_of(config: Config) -> Routing:
    """The routing settings with every model's size. Raises ConfigError for a file that cannot be read or says too little."""
    sizes = dict(config.routing.kv_bytes_by_model)
    for model, path in config.models.configs.items():
        try:
            described = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
            sizes[model] = kv_bytes_per_token(described, kv_dtype=config.models.kv_dtype)
        except (OSError, ValueError) as error:
            raise ConfigError(f"models.configs.{model}: {path}: {error}") from error
    return msgspec.structs.replace(config.routing, kv_bytes_by_model=sizes)
