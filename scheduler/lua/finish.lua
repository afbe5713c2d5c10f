#!lua flags=allow-oom
-- finish: the owner of a running batch ends its members, each once, and closes the batch.
-- KEYS[1] leases. ARGV: 1 prefix, 2 batch id, 3 token, 4 packed outcomes {id, code, gpu_ms, tokens, bytes}, where
--   an empty code means completed, 5... the end of each one's reply: packed gpu_ms, tokens, model version, output.
-- Returns the number of outcomes that came too late (stale): all of them where the token does not own the batch.
-- include: prelude, wake, repaying, ending, dead_letters, batch
local outcomes = cmsgpack.unpack(ARGV[4])
local batch = load_batch(ARGV[2])
if not batch or batch.state ~= 'running' or batch.token ~= ARGV[3] then return #outcomes end
local by_id, stale = {}, #outcomes
for i, o in ipairs(outcomes) do by_id[o[1]], o.tail = o, ARGV[4 + i] end
each_member(batch, function(id, row)
  local o = by_id[id]
  if not o then
    close(id, row, 'failed', 'invalid_output', batch, NO_RUN) -- the worker said nothing of it: this is a bug there
    return
  end
  local run = {gpu_ms = o[3], tokens = o[4], bytes = o[5], tail = o.tail}
  if o[2] == 'poison_request' then bury(id, row, o[2], batch, run)
  else close(id, row, o[2] == '' and 'completed' or 'failed', o[2], batch, run) end
  stale = stale - 1
end)
drop_batch(batch)
flush()
if redis.call('LLEN', P .. 'batch_queue') == 0 then wake_free() end -- else this worker takes that one, and its claim wakes
return stale
