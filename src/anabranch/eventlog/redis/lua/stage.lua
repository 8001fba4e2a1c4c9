-- Collects part of a restore under a key that nobody reads.
-- KEYS: staging key
-- ARGV: time to live ms, then sequence and entry of each


for at = 2, #ARGV, 2 do
  redis.call('XADD', KEYS[1], ARGV[at] .. '-0', 'e', ARGV[at + 1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 'ok'
