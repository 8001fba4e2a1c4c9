-- Claims a session for an identity, or renews the claim. Returns 0 if another identity has it.
-- KEYS: session
-- ARGV: identity, time to live ms


local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
