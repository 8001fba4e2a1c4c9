-- Creates a stream unless one of that name exists.
-- KEYS: stream hash, entries
-- ARGV: token, keeper, identity, about, head, lease ms, time to live ms, channel, token of an opening to replace


local said = redis.pcall('INFO', 'server')
local run = type(said) == 'string' and string.match(said, 'run_id:(%w+)') or ''

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local known = redis.call('HGET', KEYS[1], 'token')
if known and (ARGV[9] == '' or known ~= ARGV[9]) then return 'taken' end
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'keeper', ARGV[2], 'identity', ARGV[3], 'about', ARGV[4], 'head', ARGV[5],
  'floor', ARGV[5], 'ended', '0', 'run', run, 'lease', now + ARGV[6])
redis.call('DEL', KEYS[2])
redis.call('PEXPIRE', KEYS[1], ARGV[7])
redis.call('PUBLISH', ARGV[8], '')
return 'ok'
