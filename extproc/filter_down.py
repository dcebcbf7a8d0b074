"""What Envoy lets through by itself while no filter is there (`envoy.filter_down: round_robin`). Pure.

A client's KV-transfer keys must never reach an engine: with them it could read blocks, pin them, or end the process. The
filter takes them out; while it is away, nobody parses JSON. So the script refuses every body that *could* hold such a key: one
that has its name anywhere, or an escaped letter, with which a name could be spelt in another way, or a NUL, without which no
other encoding of JSON than UTF-8 can be written. What is left holds none, whoever parses it. If the script itself fails, the
request has no mark, and without one nobody serves it.
"""

from __future__ import annotations

import json
from typing import Final

from extproc.headers import DESTINATION_HEADER
from extproc.inference import TRANSFER_KEYS
from extproc.paths import TABLE

OPEN_HEADER: Final = "x-baton-filter-down"
"""Marks a request that no filter has seen and that may go on; the route goes by it. Stripped from clients."""

# The keys, and the objects in which the engine would find them too.
_NAMES = (*TRANSFER_KEYS, "vllm_xargs", "extra_args")

_SCRIPT = """\
local paths = { %(paths)s }
local names = { %(names)s }

local function refuse(handle)
  handle:respond({ [":status"] = "503" }, "")
end

local function may_hold_a_name(text)
  for _, name in ipairs(names) do
    if string.find(text, name, 1, true) then return true end
  end
  -- \\u0040 to \\u007f: ASCII letters, spelt so that the names would not be found.
  return string.find(text, "\\\\[uU]00[4-7]") ~= nil or string.find(text, "%%z") ~= nil
end

function envoy_on_request(handle)
  local headers = handle:headers()
  -- The filter has seen it and let it go. This header is the last that a reply of its sets, and clients cannot send it.
  if headers:get(%(destination)s) ~= nil then return end
  local path = string.match(headers:get(":path") or "", "^[^?]*")
  local kind = string.lower(string.match(headers:get("content-type") or "", "^[^;]*"))
  kind = string.gsub(kind, "%%s", "")
  if headers:get(":method") ~= "POST" or not paths[path] or kind ~= "application/json"
    or headers:get("content-encoding") ~= nil then
    return refuse(handle)
  end
  local body = handle:body(true)
  if may_hold_a_name(body:getBytes(0, body:length())) then return refuse(handle) end
%(then)send
"""

_MARK = """\
  -- Waiting for the body has ended the life of `headers`.
  handle:headers():replace(%(open)s, "1")
  handle:clearRouteCache()
"""


def script() -> str:
    """The Lua that Envoy runs after the filter on every request; one that the filter has seen passes at its first line."""
    return _made(_MARK % {"open": json.dumps(OPEN_HEADER)})


def guard() -> str:
    """The same for an Envoy that is not ours and lets requests through when the filter is away (`failureMode: FailOpen`,
    `failOpen: true`): they go wherever its route says, and hold nothing that only the filter may say. It stands right behind
    the ext_proc filter. Clients' own :data:`~extproc.headers.DESTINATION_HEADER` must be taken away before that one."""
    return _made("")


def _made(then: str) -> str:
    prompts = sorted(path for path, how in TABLE.items() if how.apart)
    return _SCRIPT % {
        "paths": ", ".join(f"[{json.dumps(path)}] = true" for path in prompts),
        "names": ", ".join(json.dumps(name) for name in _NAMES),
        "destination": json.dumps(DESTINATION_HEADER),
        "then": then,
    }
