-- Gives back unused units and the seats. KEYS as in reserve.lua.
-- ARGV: windows, request_id, slot, then the unused units of each window.
local windows = tonumber(ARGV[1])
for i = 1, windows do
  local unused = tonumber(ARGV[3 + i])
  local held = tonumber(redis.call('HGET', KEYS[i], ARGV[3]))
  if held and unused ~= 0 then
    redis.call('HSET', KEYS[i], ARGV[3], math.max(0, held - unused))
  end
end
for i = windows + 1, #KEYS do
  redis.call('ZREM', KEYS[i], ARGV[2])
end
return 1
