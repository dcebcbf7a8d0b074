"""The dashboards, made from the code in ``boards/``: ``python -m compose.grafana.make_dashboards`` writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from compose.grafana.boards.cost import cost
from compose.grafana.boards.overview import overview
from compose.grafana.boards.routing import routing
from compose.grafana.boards.workers import workers

FOLDER = Path(__file__).parent / "dashboards"


def texts() -> dict[str, str]:
    """File name -> its JSON."""
    made = (overview(), workers(), routing(), cost())
    return {
        f"{each.uid}.json": json.dumps(each, cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        for each in made
    }


def main() -> None:
    """Write them all, and remove what is no longer made."""
    found = texts()
    for name, text in found.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"{FOLDER / name}\n")
    for stray in FOLDER.glob("*.json"):
        if stray.name not in found:
            stray.unlink()


if __name__ == "__main__":
    main()
