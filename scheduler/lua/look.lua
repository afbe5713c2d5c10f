#!lua flags=allow-oom
-- look: what waits and what runs, for the dispatcher.
-- KEYS[1] leases. ARGV: 1 prefix, 2 packed tier names. Returns packed queues.
-- include: prelude, queues
return cmsgpack.pack(queues(cmsgpack.unpack(ARGV[2])))
