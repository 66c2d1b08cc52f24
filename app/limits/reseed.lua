-- Puts back what one process has admitted, once, after the server lost its memory.
-- KEYS: the epoch, the set of processes that have done so, a window per entry, a seat per call.
-- ARGV: token, process, lease_ms, entries, then second and units of each entry, then request ids.
-- Returns 0 when the epoch is another one by now.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
if redis.call('SADD', KEYS[2], ARGV[2]) == 0 then return 1 end
redis.call('EXPIRE', KEYS[2], 600)
local entries = tonumber(ARGV[4])
for i = 1, entries do
  local key = KEYS[2 + i]
  redis.call('HINCRBY', key, ARGV[3 + 2 * i], ARGV[4 + 2 * i])
  redis.call('EXPIRE', key, 90)
end
local time = redis.call('TIME')
local until_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000) + tonumber(ARGV[3])
for i = entries + 3, #KEYS do
  redis.call('ZADD', KEYS[i], until_ms, ARGV[2 + entries + i])
  redis.call('PEXPIRE', KEYS[i], tonumber(ARGV[3]) + 60000)
end
return 1
