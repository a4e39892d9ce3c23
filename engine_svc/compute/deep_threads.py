"""Threads with a deep stack, for native code that recurses as deep as its input nests."""

import threading
from concurrent.futures import ThreadPoolExecutor


def deep_thread_pool(num_threads: int, stack_bytes: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads are all started, each with `stack_bytes` of stack.

    A stack takes memory only where it is used. Python sets its size for whatever thread is started
    next, so all are started here, and the size is set back.
    """
    pool = ThreadPoolExecutor(num_threads, name)
    all_started = threading.Barrier(num_threads + 1)
    previous = threading.stack_size(stack_bytes)
    try:
        for _ in range(num_threads):
            pool.submit(all_started.wait)
        all_started.wait()
    finally:
        threading.stack_size(previous)
    return pool
