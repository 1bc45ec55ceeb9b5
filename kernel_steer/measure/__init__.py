"""`manage.py steer_bench`: how fast an eviction signal reroutes, beside live connections, over the real signal path.

`ports` measures a steered port (`steered` runs the gateway, `backend` plays the machines, `load` and `prober` the
clients); `api` the API door with answers that stream (`gateway`, `node`). `carriers` is the listener's side, `story`
makes the flips.
"""
