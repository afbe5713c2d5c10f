-- post: the request for wrk, and its figures as one line of JSON.
-- Environment: KEYS, API keys separated by blanks, used in turn (none: no Authorization).
local text = '{"input":"the quick brown fox jumps over the lazy dog"}'
local requests, turn = {}, 0

local function add(headers)
  headers["Content-Type"] = "application/json"
  requests[#requests + 1] = wrk.format("POST", nil, headers, text)
end

function init()
  for key in (os.getenv("KEYS") or ""):gmatch("%S+") do
    add({ Authorization = "Bearer " .. key })
  end
  if #requests == 0 then add({}) end
end

function request()
  turn = turn % #requests + 1
  return requests[turn]
end

function done(summary, latency)
  local e = summary.errors
  io.write(string.format(
    'FIGURES {"answered":%d,"microseconds":%d,"bad_status":%d,"connect":%d,"read":%d,"write":%d,"timeout":%d,'
      .. '"p50_us":%d,"p99_us":%d,"max_us":%d}\n',
    summary.requests, summary.duration, e.status, e.connect, e.read, e.write, e.timeout,
    latency:percentile(50), latency:percentile(99), latency.max))
end
