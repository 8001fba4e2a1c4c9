-- Deletes a stream whose opening was given up.
-- KEYS: stream hash, entries
-- ARGV: token of that opening


if redis.call('HGET', KEYS[1], 'token') == ARGV[1] then redis.call('DEL', KEYS[1], KEYS[2]) end
return 'ok'
