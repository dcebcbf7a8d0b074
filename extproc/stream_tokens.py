"""The Lua with which Envoy reads the token counts at the end of a streamed answer, without holding any of it. Pure.

Envoy has a filter of its own for this, `sse_to_metadata`. As of Envoy 1.40 it is work in progress, and one event whose data is
a bare number, string or `null` ends the whole process. This script looks at nothing but the last bytes of an answer, when it is
over; if it fails, Envoy logs that, and the answer goes on.
"""

from __future__ import annotations

import json
from typing import Final

from extproc.headers import USAGE_NAMESPACE

KEPT_BYTES: Final = 2048
"""At least so much of the end is looked at, and at most twice as much: the counts stand before the last event."""

USAGE_KEYS: Final = ("prompt_tokens", "completion_tokens")
"""As they are noted."""

# As the APIs of OpenAI say it, and Anthropic's. Inside of a string, the quote before the colon would have a backslash.
_NAMES: Final = {
    "prompt_tokens": ("prompt_tokens", "input_tokens"),
    "completion_tokens": ("completion_tokens", "output_tokens"),
}

_SCRIPT = """\
local kept = %(kept)d
local names = { %(names)s }

local function last_number(text, name)
  local found
  for number in string.gmatch(text, '"' .. name .. '":%%s*(%%d+)') do found = number end
  return tonumber(found)
end

function envoy_on_response(handle)
  local kind = handle:headers():get("content-type")
  if kind == nil or string.sub(kind, 1, 17) ~= "text/event-stream" then return end
  local pieces, first, last, size = {}, 1, 0, 0
  for chunk in handle:bodyChunks() do
    local length = chunk:length()
    local from = math.max(0, length - kept)
    last = last + 1
    pieces[last] = chunk:getBytes(from, length - from)
    size = size + length - from
    while size - #pieces[first] >= kept do
      size = size - #pieces[first]
      pieces[first] = nil
      first = first + 1
    end
  end
  local text = table.concat(pieces, "", first, last)
  for key, spellings in pairs(names) do
    for _, name in ipairs(spellings) do
      local number = last_number(text, name)
      if number ~= nil then handle:streamInfo():dynamicMetadata():set(%(namespace)s, key, number) end
    end
  end
end
"""


def script() -> str:
    """The Lua that Envoy runs on answers that may state tokens; one that is no stream of events passes at its second line."""
    names = ", ".join(
        f"[{json.dumps(key)}] = {{ {', '.join(json.dumps(name) for name in spellings)} }}" for key, spellings in _NAMES.items()
    )
    return _SCRIPT % {"kept": KEPT_BYTES, "names": names, "namespace": json.dumps(USAGE_NAMESPACE)}
