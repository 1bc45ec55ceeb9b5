"""`manage.py steer_bench`: how fast an eviction signal reroutes, with live answers, over the real signal path.

`node` plays the machines, `gateway` runs the real gateway with a business in memory, `bench` tells the story.
"""
