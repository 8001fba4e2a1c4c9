-- Deletes a stream that ended at least so long ago, or whose lease has expired. Returns 1 if it did.
-- KEYS: stream hash, entries
-- ARGV: time to live ms, ms since the end


local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local known = redis.call('HMGET', KEYS[1], 'ended', 'lease')
if not known[1] then return 0 end
if known[1] == '1' then
  if ARGV[1] - redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then return 0 end
elseif tonumber(known[2]) > now then
  return 0
end
redis.call('DEL', KEYS[1], KEYS[2])
return 1
