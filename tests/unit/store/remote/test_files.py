"""Ranges that are read through the cache are those of the file, whatever their edges; prefetching is bounded."""

from __future__ import annotations

import os
import random
import threading

import pytest

from fsdp_ckpt.store.remote.files import RangeCache, RemoteFile

EDGES = [0, 32 << 10, 64 << 10, 2 << 20, 4 << 20]
LENGTHS = [0, 1, 10, 32 << 10, 40_000, (256 << 10) - 1, 256 << 10, 300_000, 3 << 20]


@pytest.mark.parametrize("size", [0, 1, (32 << 10) - 1, 32 << 10, (32 << 10) + 1, 2 << 20, (2 << 20) + 1, 5_000_001])
def test_every_range_is_that_of_the_file(size: int) -> None:
    content = random.Random(size).randbytes(size)

    def fetch(_path: str, start: int, stop: int) -> bytes:
        assert 0 <= start < stop <= size
        return content[start:stop]

    cache = RangeCache(fetch, "memory://x")
    file = RemoteFile(cache, "x", size)
    wrong: list[tuple[int, int]] = []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            near = rng.choice([*EDGES, size]) + rng.randint(-3, 3)
            start = max(near, 0) if rng.random() < 0.7 else rng.randint(0, size + 5)
            length = rng.choice(LENGTHS)
            buffer = bytearray(length)
            count = file.read_into(memoryview(buffer), start)
            expected = content[start : start + length]
            if file.read(start, length) != expected or buffer[:count] != expected:
                wrong.append((start, length))
            file.prefetch([(rng.randint(0, size + 1), rng.randint(0, size + 1)) for _ in range(3)])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache.close()
    assert wrong == []


def test_a_hint_about_very_much_is_bounded() -> None:
    asked: list[int] = []

    def fetch(_path: str, start: int, stop: int) -> bytes:
        asked.append(stop - start)
        return bytes(stop - start)

    cache = RangeCache(fetch, "memory://x")
    RemoteFile(cache, "x", 1 << 30).prefetch([(head * 60_000, head * 60_000 + 700) for head in range(4096)])
    cache.close()
    assert max(asked) <= 2 << 20
    assert sum(asked) <= 32 << 20


def test_a_forked_process_fetches_by_threads_of_its_own() -> None:
    cache = RangeCache(lambda _path, start, stop: b"x" * (stop - start), "memory://x")
    file = RemoteFile(cache, "x", 8 << 20)
    file.read_into(memoryview(bytearray(1 << 20)), 0)
    child = os.fork()
    if child == 0:
        cache.begin_anew()
        done = threading.Event()

        def read() -> None:
            if file.read_into(memoryview(bytearray(1 << 20)), 5 << 20) == 1 << 20:
                done.set()

        threading.Thread(target=read, daemon=True).start()
        os._exit(0 if done.wait(20) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    cache.close()
