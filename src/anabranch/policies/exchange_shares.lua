-- Store what one worker's callers hold, and return what the others have stored. Workers that have been silent for too
-- long are dropped. KEYS: the hash of workers. ARGV: the worker, what it holds, milliseconds until it counts as gone.

local key, worker, held, gone_ms = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local others = {}
for at, field in ipairs(redis.call('HKEYS', key)) do
  if field ~= worker then
    local stored = redis.call('HGET', key, field)
    local since = now - tonumber(string.sub(stored, 1, 15))
    if since < -gone_ms or since > gone_ms then
      redis.call('HDEL', key, field)
    else
      others[#others + 1] = string.sub(stored, 16)
    end
  end
end
redis.call('HSET', key, worker, string.format('%015.0f', now) .. held)
redis.call('PEXPIRE', key, 2 * gone_ms)
return others
