-- Reserves every unit and every seat of one call, or nothing. The rule is app/limits/window.py's.
-- KEYS: the epoch, one hash (second -> units) per window, one sorted set (request -> lease) per seat.
-- ARGV: token of the epoch, windows, take (0: peek), request_id, lease_ms, then limit and amount of
--       each window, then the limit of each seat.
-- Returns {second, refused (0 none, i window, -1 seat), wait_ms, used_1, reset_ms_1, ..., seats_1, ...},
-- or {-1} when the server has lost its memory since the caller last looked.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return {-1} end
local windows = tonumber(ARGV[2])
local take = ARGV[3] == '1'
local request_id = ARGV[4]
local lease_ms = tonumber(ARGV[5])
local seats = #KEYS - 1 - windows

local time = redis.call('TIME')
local second = tonumber(time[1])
local now_ms = second * 1000 + math.floor(tonumber(time[2]) / 1000)

local function gone_in(slot)
  return math.max(1, (slot + 61) * 1000 - now_ms + 1)
end

local function read(key)
  local slots, used, newest = {}, 0, nil
  local fields = redis.call('HGETALL', key)
  for i = 1, #fields, 2 do
    local slot, units = tonumber(fields[i]), tonumber(fields[i + 1])
    if slot < second - 60 then
      redis.call('HDEL', key, fields[i])
    elseif units > 0 then
      slots[#slots + 1] = {slot, units}
      used = used + units
      if not newest or slot > newest then newest = slot end
    end
  end
  table.sort(slots, function(a, b) return a[1] < b[1] end)
  return slots, used, newest
end

local function wait_for(slots, used, amount, limit)
  if used + amount <= limit then return 0 end
  for _, entry in ipairs(slots) do
    used = used - entry[2]
    if used + amount <= limit then return gone_in(entry[1]) end
  end
  return 60000
end

local refused, longest = 0, 0
local levels, taken = {}, {}
for i = 1, windows do
  local limit, amount = tonumber(ARGV[4 + 2 * i]), tonumber(ARGV[5 + 2 * i])
  local slots, used, newest = read(KEYS[1 + i])
  levels[i] = {used, newest and gone_in(newest) or 0}
  local needed = wait_for(slots, used, amount, limit)
  if take and needed > longest then
    refused, longest = i, needed
  end
end

for i = 1, seats do
  local key = KEYS[1 + windows + i]
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now_ms)
  taken[i] = redis.call('ZCARD', key)
  if take and refused == 0 and taken[i] >= tonumber(ARGV[5 + 2 * windows + i]) then
    refused, longest = -1, 1000
  end
end

if take and refused == 0 then
  for i = 1, windows do
    local amount = tonumber(ARGV[5 + 2 * i])
    redis.call('HINCRBY', KEYS[1 + i], second, amount)
    redis.call('EXPIRE', KEYS[1 + i], 90)
    levels[i] = {levels[i][1] + amount, gone_in(second)}
  end
  for i = 1, seats do
    local key = KEYS[1 + windows + i]
    redis.call('ZADD', key, now_ms + lease_ms, request_id)
    redis.call('PEXPIRE', key, lease_ms + 60000)
    taken[i] = taken[i] + 1
  end
end

local reply = {second, refused, longest}
for i = 1, windows do
  reply[#reply + 1] = levels[i][1]
  reply[#reply + 1] = levels[i][2]
end
for i = 1, seats do
  reply[#reply + 1] = taken[i]
end
return reply
