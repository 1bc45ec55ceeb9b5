"""The Lua side of `limits`. The clock is Redis's own, so gateways on several machines share one truth.

Three keys for an API key, in one slot of a cluster:

    buckets  hash    level and time of the token buckets `requests` and `tokens`, each filled evenly within
                     a minute; `tokens` goes below zero when an answer took more than was reserved for it
    open     zset    request id -> when its lease ends (ms)
    held     hash    request id -> tokens reserved, and the two capacities that it was admitted under
"""

from __future__ import annotations

NOTHING_DONE = -1


def keys_of(key_id: str) -> list[str]:
    return [f"apex:limits:{{{key_id}}}:{part}" for part in ("buckets", "open", "held")]


_COMMON = """
local MINUTE_MS = 60000
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function level(name, capacity)
  local bucket = redis.call('HMGET', KEYS[1], name, name .. '_at')
  local kept, at = tonumber(bucket[1]) or capacity, tonumber(bucket[2]) or now
  return math.min(capacity, kept + math.max(0, now - at) * capacity / MINUTE_MS)
end

-- A bucket that is full is the same as none.
local function keep(name, capacity, value)
  value = math.min(capacity, value)
  redis.call('HSET', KEYS[1], name, tostring(value), name .. '_at', now)
  local full_in = math.ceil((capacity - value) * MINUTE_MS / capacity)
  if redis.call('PTTL', KEYS[1]) < full_in + MINUTE_MS then
    redis.call('PEXPIRE', KEYS[1], full_in + MINUTE_MS)
  end
end
"""

# ARGV: request id, requests and tokens per minute, answers at a time (0: no limit), tokens to reserve,
# lease in ms. Returns the name of the limit that says no (of several the one to wait longest for) and the
# wait in ms, or an empty name.
TAKE = (
    _COMMON
    + """
local id, rpm, tpm, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local asked, lease = tonumber(ARGV[5]), tonumber(ARGV[6])

-- Leases that nobody renewed belong to a gateway that is gone.
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('ZREM', KEYS[2], dead)
  redis.call('HDEL', KEYS[3], dead)
end
if redis.call('ZSCORE', KEYS[2], id) then return {'', 0} end

local requests, tokens = rpm > 0 and level('requests', rpm), tpm > 0 and level('tokens', tpm)
local refused, wait = '', 0
if most > 0 and redis.call('ZCARD', KEYS[2]) >= most then refused, wait = 'answers', 1 end
if rpm > 0 and requests < 1 then
  refused, wait = 'requests', math.ceil((1 - requests) * MINUTE_MS / rpm)
end
if tpm > 0 and tokens < asked then
  local until_there = math.ceil((asked - tokens) * MINUTE_MS / tpm)
  if until_there > wait then refused, wait = 'tokens', until_there end
end
if refused ~= '' then return {refused, wait} end

if rpm > 0 then keep('requests', rpm, requests - 1) end
if tpm > 0 then keep('tokens', tpm, tokens - asked) end
redis.call('ZADD', KEYS[2], now + lease, id)
redis.call('HSET', KEYS[3], id, string.format('%d %d %d', asked, rpm, tpm))
redis.call('PEXPIRE', KEYS[2], 2 * lease)
redis.call('PEXPIRE', KEYS[3], 2 * lease)
return {'', 0}
"""
)

# ARGV: request id, tokens that it took (NOTHING_DONE: the request does not count either). Whoever removes
# the reservation corrects the buckets, so a second call changes nothing.
END = (
    _COMMON
    + """
local id, took = ARGV[1], tonumber(ARGV[2])
redis.call('ZREM', KEYS[2], id)
local held = redis.call('HGET', KEYS[3], id)
if not held then return 0 end
redis.call('HDEL', KEYS[3], id)
local asked, rpm, tpm = string.match(held, '^(%d+) (%d+) (%d+)$')
asked, rpm, tpm = tonumber(asked), tonumber(rpm), tonumber(tpm)
if tpm > 0 then keep('tokens', tpm, level('tokens', tpm) + asked - math.max(0, took)) end
if rpm > 0 and took < 0 then keep('requests', rpm, level('requests', rpm) + 1) end
return 1
"""
)

# ARGV: lease in ms, request ids. What Redis has lost counts as open again.
RENEW = (
    _COMMON
    + """
local lease = tonumber(ARGV[1])
for i = 2, #ARGV do redis.call('ZADD', KEYS[2], now + lease, ARGV[i]) end
redis.call('PEXPIRE', KEYS[2], 2 * lease)
redis.call('PEXPIRE', KEYS[3], 2 * lease)
return 0
"""
)
