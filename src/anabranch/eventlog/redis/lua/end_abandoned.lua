-- Ends a stream whose lease has expired.
-- KEYS: stream hash, entries
-- ARGV: final entry, time to live ms, channel, an epoch that no owner uses
-- If this is not the server process on which the epoch began, Redis may hold less than readers have received, and its next
-- sequence may be in use. Then all entries are renumbered in the given epoch.


local said = redis.pcall('INFO', 'server')
local run = type(said) == 'string' and string.match(said, 'run_id:(%w+)') or ''

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local known = redis.call('HMGET', KEYS[1], 'token', 'head', 'ended', 'lease', 'run')
if not known[1] then return 'absent' end
if known[3] == '1' then return 'ended' end
if tonumber(known[4]) > now then return 'held' end
local head = tonumber(known[2])
if run == '' or run ~= known[5] then
  local kept = redis.call('XRANGE', KEYS[2], '-', '+')
  redis.call('DEL', KEYS[2])
  head = ARGV[4] * 4294967296
  redis.call('HSET', KEYS[1], 'floor', string.format('%.0f', head))
  for _, each in ipairs(kept) do
    head = head + 1
    redis.call('XADD', KEYS[2], string.format('%.0f-0', head), 'e', each[2][2])
  end
end
local last = string.format('%.0f', head + 1)
redis.call('XADD', KEYS[2], last .. '-0', 'e', ARGV[1])
redis.call('HSET', KEYS[1], 'token', '', 'head', last, 'ended', '1')
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
redis.call('PUBLISH', ARGV[3], '')
return 'buried'
