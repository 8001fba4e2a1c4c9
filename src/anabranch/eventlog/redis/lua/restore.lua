-- Replaces a stream by its owner's copy: the staged entries, then the given ones.
-- KEYS: stream hash, entries, staging key, time before which ended streams were forgotten
-- ARGV: token, keeper, identity, about, head, floor, ended, lease ms, time to live ms, channel, 1 if anything was staged,
-- ms since the end, then sequence and entry of each


local said = redis.pcall('INFO', 'server')
local run = type(said) == 'string' and string.match(said, 'run_id:(%w+)') or ''

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local forgotten = redis.call('GET', KEYS[4])
if forgotten and ARGV[7] == '1' and now - ARGV[12] <= tonumber(forgotten) then return 'lost' end
local known = redis.call('HMGET', KEYS[1], 'token', 'head')
if known[1] and known[1] ~= ARGV[1] then return 'lost' end
if known[2] and tonumber(known[2]) > tonumber(ARGV[5]) then return 'ahead' end
if ARGV[11] == '1' and redis.call('EXISTS', KEYS[3]) == 0 then return 'unstaged' end
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'keeper', ARGV[2], 'identity', ARGV[3], 'about', ARGV[4], 'head', ARGV[5],
  'floor', ARGV[6], 'ended', ARGV[7], 'run', run, 'lease', now + ARGV[8])
redis.call('DEL', KEYS[2])
if ARGV[11] == '1' then redis.call('RENAME', KEYS[3], KEYS[2]) end
for at = 13, #ARGV, 2 do
  redis.call('XADD', KEYS[2], ARGV[at] .. '-0', 'e', ARGV[at + 1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[9])
redis.call('PEXPIRE', KEYS[2], ARGV[9])
redis.call('PUBLISH', ARGV[10], '')
return 'ok'
