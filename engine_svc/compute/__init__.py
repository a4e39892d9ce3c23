"""The half of the engine that computes: model, KV cache, sampler, on torch.

Importing it settles how torch's threads wait for each other, which libgomp reads once, when torch
is loaded. By default they spin for milliseconds at each of some 150 barriers a token; as soon as
another process wants a core, the one that is waited for is not running, and a step takes ten times
as long. After a short spin they sleep: 5 to 10 % slower on idle cores, 3 to 15 times as fast on
shared ones.

Likewise how many primitives oneDNN keeps: one for each shape, and prompts have any length. Of its
default of 1024 an engine grew by 7 % over 5,000 short requests, with 64 by 2 %; steps are as fast.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
