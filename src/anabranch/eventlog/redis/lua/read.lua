-- Reads the entries after a cursor.
-- KEYS: stream hash, entries
-- ARGV: cursor, maximum count, approximate maximum bytes, 1 to continue even where the cursor is not valid


local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local known = redis.call('HMGET', KEYS[1], 'head', 'floor', 'ended', 'identity', 'about', 'keeper', 'lease')
if not known[1] then return false end
local after, head, floor = tonumber(ARGV[1]), tonumber(known[1]), tonumber(known[2])
if head % 4294967296 > 0 and redis.call('EXISTS', KEYS[2]) == 0 then return false end
local from, reset = ARGV[1] .. '-1', 0
if ARGV[4] == '0' and after ~= 0 and (after < floor or after > head) then from, reset = '-', 1 end
local limit, room, more, entries = tonumber(ARGV[2]), tonumber(ARGV[3]), 0, {}
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
return {known[1], known[2], reset, more, tonumber(known[3]), known[4], known[5], known[6], abandoned, entries}
