"""What Redis does in one step for the ledger: scripts of one key each, as a Cluster wants them.

`held` is what the key has. A record belongs to the owner with the highest epoch; another
`incarnation` is another request that uses the id again.
"""

from typing import Final

from gateway.redis_batch import Script

# (epoch, incarnation, owner, is final, ttl, field, value…) → 1, or 0 when another owns the record
# by now. Final is what finishes it or hands it over: what comes late, out of a connection that was
# given up, does not undo it.
WRITE_RECORD: Final = Script("""
local held = redis.call('HMGET', KEYS[1], 'incarnation', 'epoch', 'owner', 'final')
if held[1] then
    local held_epoch, epoch = tonumber(held[2] or 1), tonumber(ARGV[1])
    if held[1] ~= ARGV[2] or held_epoch < epoch then
        redis.call('DEL', KEYS[1])
    elseif held_epoch > epoch or held[3] ~= ARGV[3] then
        return 0
    elseif held[4] == '1' and ARGV[4] == '0' then
        return 1
    end
end
redis.call('HSET', KEYS[1], 'final', ARGV[4], unpack(ARGV, 6))
redis.call('EXPIRE', KEYS[1], ARGV[5])
return 1
""")

# (now, lapse, ttl, number of live ids, live id…, ended id…): the index of live requests, by the
# time at which each lapses.
UPDATE_INDEX: Final = Script("""
local num_live = tonumber(ARGV[4])
for place = 5, #ARGV do
    if place < 5 + num_live then
        redis.call('ZADD', KEYS[1], ARGV[2], ARGV[place])
    else
        redis.call('ZREM', KEYS[1], ARGV[place])
    end
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
""")

# (id, incarnation, epoch, owner, new owner, attempt, ttl) → the new epoch, or 0 when the record is
# no longer what it was. One that is gone may be taken. An attempt that comes twice succeeds twice.
TAKE_OVER: Final = Script("""
local held = redis.call('HMGET', KEYS[1], 'incarnation', 'epoch', 'owner', 'attempt')
local epoch = tonumber(ARGV[3])
if held[1] then
    local held_epoch = tonumber(held[2] or 1)
    if held[4] == ARGV[6] and held_epoch == epoch + 1 then
        return held_epoch
    end
    if held[1] ~= ARGV[2] or held_epoch ~= epoch or held[3] ~= ARGV[4] then
        return 0
    end
end
redis.call('HSET', KEYS[1], 'id', ARGV[1], 'incarnation', ARGV[2], 'epoch', epoch + 1,
    'owner', ARGV[5], 'attempt', ARGV[6], 'released', 'False', 'final', '0')
redis.call('EXPIRE', KEYS[1], ARGV[7])
return epoch + 1
""")

# (attempt) → 1 when that attempt to take over had succeeded; the record may then be taken again.
GIVE_BACK: Final = Script("""
if redis.call('HGET', KEYS[1], 'attempt') ~= ARGV[1] then
    return 0
end
redis.call('HSET', KEYS[1], 'released', 'True')
return 1
""")

# (length, ttl, entry…) → 1, or 0 when the list is not as long as it was written. A length of -1:
# it is written from the beginning. Entries that are there already, since the reply got lost, count.
APPEND: Final = Script("""
local length, num_new = tonumber(ARGV[1]), #ARGV - 2
if length == -1 then
    redis.call('DEL', KEYS[1])
    length = 0
end
local num_there = redis.call('LLEN', KEYS[1]) - length
if num_there < 0 or num_there > num_new then
    return 0
end
if num_there < num_new then
    redis.call('RPUSH', KEYS[1], unpack(ARGV, 3 + num_there))
end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
""")

# (old, new, ttl) → 1 when the value was the old one; an empty new one: it is deleted.
REPLACE: Final = Script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return 0
end
if ARGV[2] == '' then
    redis.call('DEL', KEYS[1])
else
    redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
end
return 1
""")
