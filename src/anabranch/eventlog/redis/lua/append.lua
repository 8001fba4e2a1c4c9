-- Appends entries if the token and the whole head match, and renews the lease.
-- KEYS: stream hash, entries
-- ARGV: token, head before, head after, ended, lease ms, time to live ms, channel, then sequence and entry of each


local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local known = redis.call('HMGET', KEYS[1], 'token', 'head', 'ended')
if not known[1] then return 'behind' end
if known[1] ~= ARGV[1] or known[3] == '1' then return 'lost' end
if known[2] ~= ARGV[2] then return 'behind' end
if tonumber(ARGV[2]) % 4294967296 > 0 and redis.call('EXISTS', KEYS[2]) == 0 then return 'behind' end
for at = 8, #ARGV, 2 do
  redis.call('XADD', KEYS[2], ARGV[at] .. '-0', 'e', ARGV[at + 1])
end
redis.call('HSET', KEYS[1], 'head', ARGV[3], 'ended', ARGV[4], 'lease', now + ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
redis.call('PEXPIRE', KEYS[2], ARGV[6])
if ARGV[2] ~= ARGV[3] then redis.call('PUBLISH', ARGV[7], '') end
return 'ok'
