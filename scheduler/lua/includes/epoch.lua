-- epoch: when this Redis was first used, in microseconds (needs prelude and protocol). Another one than before tells a gateway that
-- Redis came back empty, whatever it was asked meanwhile.
local function begin_epoch()
  call('SET', P .. 'epoch', string.format('%.0f', now_us), 'NX')
  return call('GET', P .. 'epoch')
end

-- note_protocol(): where none is noted, after Redis was emptied, it is this one.
local function note_protocol()
  if not stored then redis.pcall('SET', 'protocol', PROTOCOL, 'NX') end
end
