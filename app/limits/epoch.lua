-- The memory of this server, by name: whoever finds another name knows that counters were lost.
-- KEYS: the epoch (hash: token, at). ARGV: a new token, 1 when nothing can have been lost.
-- Returns {token, age_ms}.
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local token = redis.call('HGET', KEYS[1], 'token')
if not token then
  token = ARGV[1]
  local at = now_ms
  if ARGV[2] == '1' then at = 0 end
  redis.call('HSET', KEYS[1], 'token', token, 'at', at)
end
return {token, now_ms - tonumber(redis.call('HGET', KEYS[1], 'at'))}
