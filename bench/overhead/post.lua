-- For wrk: posts the bodies of a file in turn, each with a number of its own. Arguments: file, first number, "name: value"...
local heads, tails, at = {}, {}, 0

local function read_bodies(name)
  local file = assert(io.open(name, "rb"))
  local function part()
    local size = file:read("*l")
    return size and assert(file:read(tonumber(size)))
  end
  for head in part do
    heads[#heads + 1] = head
    tails[#tails + 1] = part()
  end
  file:close()
end

function init(args)
  read_bodies(args[1])
  at = tonumber(args[2])
  local lines = { "POST " .. wrk.path .. " HTTP/1.1", "host: " .. wrk.host .. ":" .. wrk.port, "user-agent: bench",
                  "accept: */*", "content-type: application/json", "authorization: Bearer none" }
  for i = 3, #args do lines[#lines + 1] = args[i] end
  local start = table.concat(lines, "\r\n") .. "\r\ncontent-length: "
  for i = 1, #heads do
    local size = #heads[i] + 12 + #tails[i]
    heads[i] = start .. size .. "\r\n\r\n" .. heads[i]
  end
end

function request()
  at = at + 1
  local i = at % #heads + 1
  return heads[i] .. string.format("%012d", at % 1e12) .. tails[i]
end

function done(summary, latency, _)
  local e = summary.errors
  io.write(string.format('{"requests":%d,"duration_us":%d,"bytes":%d,"p50_us":%.1f,"p99_us":%.1f,"mean_us":%.1f,' ..
    '"errors":{"connect":%d,"read":%d,"write":%d,"status":%d,"timeout":%d}}\n',
    summary.requests, summary.duration, summary.bytes, latency:percentile(50), latency:percentile(99), latency.mean,
    e.connect, e.read, e.write, e.status, e.timeout))
end
