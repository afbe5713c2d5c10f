-- worker_status: by its status, whether a worker can run batches.
local function is_healthy(status)
  return status == 'ready' or status == 'busy'
end
