"""The table of paths knows every endpoint of the running engine, those of its developer mode included."""

from __future__ import annotations

import json
import urllib.request

from extproc.paths import TABLE, Treatment, treatment


def test_every_path_of_the_engine_is_in_the_table(decode_url: str) -> None:
    with urllib.request.urlopen(f"{decode_url}/openapi.json", timeout=60) as reply:
        paths = set(json.load(reply)["paths"])
    assert {"/v1/chat/completions", "/collective_rpc", "/scale_elastic_ep"} <= paths  # developer mode is on
    unknown = {path for path in paths if path not in TABLE and treatment("POST", path) is not Treatment.REFUSED}
    # Below /v1/responses/ stands the id of a response; the engine keeps such only for one worker.
    assert unknown <= {"/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"}
