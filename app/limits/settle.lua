-- Gives back unused units and the seats. KEYS as in reserve.lua.
-- ARGV: token of the epoch, windows, request_id, slot, then the unused units of each window.
-- Returns 0, and does nothing, when the server has lost its memory meanwhile.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
local windows = tonumber(ARGV[2])
for i = 1, windows do
  local unused = tonumber(ARGV[4 + i])
  local held = tonumber(redis.call('HGET', KEYS[1 + i], ARGV[4]))
  if held and unused ~= 0 then
    redis.call('HSET', KEYS[1 + i], ARGV[4], math.max(0, held - unused))
  end
end
for i = windows + 2, #KEYS do
  redis.call('ZREM', KEYS[i], ARGV[3])
end
return 1
