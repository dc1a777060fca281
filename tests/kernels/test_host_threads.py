"""host_attention and host_scores with any number of threads, in any thread, after a fork."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from hf_kvret_kernels.host_attention import host_attention, host_scores

from .paged_rows import paged, random_ids, random_query


@pytest.mark.parametrize("shape", [(1, 1, 5000), (2, 3, 40)], ids=str)
def test_the_number_of_threads_changes_nothing(compiled: None, shape: tuple[int, int, int]) -> None:
    batch, queries, count = shape
    rows = paged(chunks=(80,), batch=batch, kv_heads=1, page_len=64)
    query, ids = random_query(rows, 4, queries), random_ids(rows, 1, queries, count)
    ids[..., : count // 2] = -1
    want = host_attention(query, rows, ids, scale=0.3, threads=1)
    want_scores = host_scores(query, rows, ids, scale=0.3, threads=1)
    for threads in range(2, 9):
        got = host_attention(query, rows, ids, scale=0.3, threads=threads)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        scores = host_scores(query, rows, ids, scale=0.3, threads=threads)
        assert torch.equal(scores, want_scores)


def test_two_python_threads_at_once(compiled: None) -> None:
    rows = paged(chunks=(40,), page_len=64)
    query, ids = random_query(rows, 4), random_ids(rows, 2, 1, 1000)
    want = host_attention(query, rows, ids, scale=0.3, threads=1)
    wrong: list[int] = []

    def work() -> None:
        for turn in range(50):
            got = host_attention(query, rows, ids, scale=0.3, threads=3)
            if not torch.allclose(got[0], want[0], rtol=0, atol=1e-5):
                wrong.append(turn)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert not wrong


def test_a_child_after_fork_has_threads_of_its_own(compiled: None) -> None:
    rows = paged(chunks=(40,), page_len=64)
    query, ids = random_query(rows, 4), random_ids(rows, 2, 1, 1000)
    want, _ = host_attention(query, rows, ids, scale=0.3, threads=4)
    child = os.fork()
    if child == 0:
        # No torch arithmetic here: its own threads do not survive a fork.
        out, _ = host_attention(query, rows, ids, scale=0.3, threads=4)
        same = bytes(out.numpy().data) == bytes(want.numpy().data)
        os._exit(0 if same and len(os.listdir("/proc/self/task")) > 1 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
