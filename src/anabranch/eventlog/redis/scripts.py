"""What Redis does for the shared log, each as one step that nothing can come between.

A stream is a hash (who may read it, who writes it, how far it is) and a Redis stream of entries whose ids are their
sequences. Sequences travel as text and stay below 2**53, so that Lua's numbers hold them exactly. Time is Redis' own:
workers' clocks need not agree. The first thing that a script writes is one that a Redis without memory refuses, so that
it does all or nothing.
"""

# Which process this is. One that does not tell counts as another one always.
_RUN = """
local said = redis.pcall('INFO', 'server')
local run = type(said) == 'string' and string.match(said, 'run_id:(%w+)') or ''
"""

_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

# ARGV: token, keeper, identity, about, head, lease ms, time to live ms, channel, a token that was never used
OPEN = f"""{_RUN}{_NOW}
local known = redis.call('HGET', KEYS[1], 'token')
if known and (ARGV[9] == '' or known ~= ARGV[9]) then return 'taken' end
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'keeper', ARGV[2], 'identity', ARGV[3], 'about', ARGV[4], 'head', ARGV[5],
  'floor', ARGV[5], 'ended', '0', 'run', run, 'lease', now + ARGV[6])
redis.call('DEL', KEYS[2])
redis.call('PEXPIRE', KEYS[1], ARGV[7])
redis.call('PUBLISH', ARGV[8], '')
return 'ok'
"""

# ARGV: token, head before, head after, ended, lease ms, time to live ms, channel, then sequence and entry of each
APPEND = f"""{_NOW}
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
"""

# ARGV: token, head, floor, then those that go
TRIM = """
local known = redis.call('HMGET', KEYS[1], 'token', 'head')
if known[1] ~= ARGV[1] or known[2] ~= ARGV[2] then return 'behind' end
for at = 4, #ARGV, 1000 do
  redis.call('XDEL', KEYS[2], unpack(ARGV, at, math.min(at + 999, #ARGV)))
end
redis.call('HSET', KEYS[1], 'floor', ARGV[3])
return 'ok'
"""

# ARGV: cursor, at most so many, about so many bytes, whether to go on there even where the cursor means nothing
READ = f"""{_NOW}
local known = redis.call('HMGET', KEYS[1], 'head', 'floor', 'ended', 'identity', 'about', 'keeper', 'lease')
if not known[1] then return false end
local after, head, floor = tonumber(ARGV[1]), tonumber(known[1]), tonumber(known[2])
if head % 4294967296 > 0 and redis.call('EXISTS', KEYS[2]) == 0 then return false end
local from, reset = ARGV[1] .. '-1', 0
if ARGV[4] == '0' and after ~= 0 and (after < floor or after > head) then from, reset = '-', 1 end
local limit, room, more, entries = tonumber(ARGV[2]), tonumber(ARGV[3]), 0, {{}}
while more == 0 do
  local slice = math.max(1, math.min(64, limit - #entries / 2 + 1))
  local found = redis.call('XRANGE', KEYS[2], from, '+', 'COUNT', slice)
  for _, each in ipairs(found) do
    if #entries / 2 >= limit or (room <= 0 and #entries > 0) then more = 1 break end
    local packed = each[2][2]
    entries[#entries + 1], entries[#entries + 2] = each[1], packed
    room = room - #packed
    from = string.match(each[1], '%d+') .. '-1'
  end
  if #found < slice then break end
end
local abandoned = (known[3] == '0' and tonumber(known[7]) <= now) and 1 or 0
return {{known[1], known[2], reset, more, tonumber(known[3]), known[4], known[5], known[6], abandoned, entries}}
"""

# ARGV: entry, time to live ms, channel, an epoch of nobody's. If this is not the server on which the epoch
# began, what it holds may be older than what readers have had, so that its next number may be used up: then everything
# is counted anew.
BURY = f"""{_RUN}{_NOW}
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
"""

# KEYS: where to collect. ARGV: time to live ms, then sequence and entry of each
STAGE = """
for at = 2, #ARGV, 2 do
  redis.call('XADD', KEYS[1], ARGV[at] .. '-0', 'e', ARGV[at + 1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 'ok'
"""

# KEYS: the two, and where it was collected. ARGV: token, keeper, identity, about, head, floor, ended, lease ms, time to
# live ms, channel, whether anything was collected, then sequence and entry of each that comes on top of it
RESTORE = f"""{_RUN}{_NOW}
local known = redis.call('HMGET', KEYS[1], 'token', 'head')
if known[1] and known[1] ~= ARGV[1] then return 'lost' end
if known[2] and tonumber(known[2]) > tonumber(ARGV[5]) then return 'ahead' end
if ARGV[11] == '1' and redis.call('EXISTS', KEYS[3]) == 0 then return 'unstaged' end
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'keeper', ARGV[2], 'identity', ARGV[3], 'about', ARGV[4], 'head', ARGV[5],
  'floor', ARGV[6], 'ended', ARGV[7], 'run', run, 'lease', now + ARGV[8])
redis.call('DEL', KEYS[2])
if ARGV[11] == '1' then redis.call('RENAME', KEYS[3], KEYS[2]) end
for at = 12, #ARGV, 2 do
  redis.call('XADD', KEYS[2], ARGV[at] .. '-0', 'e', ARGV[at + 1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[9])
redis.call('PEXPIRE', KEYS[2], ARGV[9])
redis.call('PUBLISH', ARGV[10], '')
return 'ok'
"""

# ARGV: identity, time to live ms
CLAIM = """
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

# ARGV: the token of an opening that nobody wants any more
UNDO = """
if redis.call('HGET', KEYS[1], 'token') == ARGV[1] then redis.call('DEL', KEYS[1], KEYS[2]) end
return 'ok'
"""
