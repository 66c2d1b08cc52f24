-- Extends seats that are still held. KEYS: one sorted set per seat. ARGV: lease_ms, request ids.
local time = redis.call('TIME')
local until_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000) + tonumber(ARGV[1])
for i, key in ipairs(KEYS) do
  redis.call('ZADD', key, 'XX', until_ms, ARGV[i + 1])
  redis.call('PEXPIRE', key, tonumber(ARGV[1]) + 60000)
end
return 1
