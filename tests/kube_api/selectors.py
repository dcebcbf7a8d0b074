"""Label and field selectors, as the API server understands them."""

from __future__ import annotations

import re
from typing import Any

_SET = re.compile(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)")


def labels_match(labels: dict[str, str], selector: str) -> bool:
    return all(_requirement(labels, each) for each in _parts(selector))


def fields_match(found: dict[str, Any], selector: str) -> bool:
    for each in filter(None, selector.split(",")):
        path, _, value = each.partition("=")
        if path not in ("metadata.name", "metadata.namespace", "status.phase"):
            raise ValueError(f"field label not supported: {path}")
        where: Any = found
        for step in path.split("."):
            where = where.get(step, {})
        if where != value.lstrip("="):
            return False
    return True


def _parts(selector: str) -> list[str]:
    # Commas separate, but not within parentheses.
    return [each.strip() for each in re.split(r",(?![^(]*\))", selector) if each.strip()]


def _requirement(labels: dict[str, str], text: str) -> bool:
    if match := _SET.fullmatch(text):
        key, word, values = match.groups()
        inside = labels.get(key) in {value.strip() for value in values.split(",")}
        return inside if word == "in" else not inside
    if "!=" in text:
        key, _, value = text.partition("!=")
        return labels.get(key.strip()) != value.strip()
    if "=" in text:
        key, _, value = text.partition("=")
        return labels.get(key.strip()) == value.strip("= ")
    return text[1:] not in labels if text.startswith("!") else text in labels
