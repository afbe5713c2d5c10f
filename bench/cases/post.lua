-- For wrk: POST one small input with each API key in KEYS in turn; prints the results as one line of JSON.
local requests, turn = {}, 0
local body = '{"input":"the quick brown fox jumps"}'

init = function()
  for key in string.gmatch(os.getenv('KEYS'), '%S+') do
    local headers = { ['Content-Type'] = 'application/json', ['Authorization'] = 'Bearer ' .. key }
    requests[#requests + 1] = wrk.format('POST', '/v1/inference', headers, body)
  end
end

request = function()
  turn = turn % #requests + 1
  return requests[turn]
end

done = function(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    'RESULT {"requests":%d,"seconds":%.3f,"refused":%d,"broken":%d,"p50_ms":%.3f,"p99_ms":%.3f,"max_ms":%.3f}\n',
    summary.requests, summary.duration / 1e6, errors.status,
    errors.connect + errors.read + errors.write + errors.timeout,
    latency:percentile(50) / 1000, latency:percentile(99) / 1000, latency.max / 1000))
end
