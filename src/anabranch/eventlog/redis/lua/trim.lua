-- Deletes trimmed entries and raises the floor.
-- KEYS: stream hash, entries
-- ARGV: token, head, floor, then the sequences to delete


local known = redis.call('HMGET', KEYS[1], 'token', 'head')
if known[1] ~= ARGV[1] or known[2] ~= ARGV[2] then return 'behind' end
for at = 4, #ARGV, 1000 do
  redis.call('XDEL', KEYS[2], unpack(ARGV, at, math.min(at + 999, #ARGV)))
end
redis.call('HSET', KEYS[1], 'floor', ARGV[3])
return 'ok'
