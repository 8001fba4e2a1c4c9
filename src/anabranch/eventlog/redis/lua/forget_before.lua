-- Keeps owners from restoring streams that ended at least so long ago, while they still have them in memory.
-- KEYS: time before which ended streams were forgotten
-- ARGV: ms since the end, time to live ms


local time = redis.call('TIME')
local before = time[1] * 1000 + math.floor(time[2] / 1000) - ARGV[1]

local known = redis.call('GET', KEYS[1])
if known and tonumber(known) > before then before = known end
redis.call('SET', KEYS[1], string.format('%.0f', before), 'PX', ARGV[2])
return 1
