"""At most so many bytes are on their way to the host: older copies are waited for, in order."""

from __future__ import annotations

import threading

import torch

from hf_kvret.stores.memory import PendingCopies, pending_copies


class _Copy:
    """An event of a copy that ends when it is waited for, or told to."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.ended = name, log, False

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        self.log.append(self.name)
        self.ended = True


def test_the_oldest_copies_are_waited_for_when_too_much_is_under_way() -> None:
    log: list[str] = []
    copies = PendingCopies(100)
    for name, size, waited in (
        ("a", 40, []),
        ("b", 60, []),
        ("c", 1, ["a"]),
        ("d", 90, ["a", "b"]),
        ("e", 50, ["a", "b", "c", "d"]),
    ):
        copies.add(_Copy(name, log), size)
        assert log == waited and copies.nbytes <= 100


def test_copies_that_ended_are_forgotten_without_waiting() -> None:
    log: list[str] = []
    copies = PendingCopies(100)
    first, second = _Copy("first", log), _Copy("second", log)
    copies.add(first, 60)
    copies.add(second, 30)
    first.ended = True
    copies.add(_Copy("third", log), 70)
    assert log == [] and copies.nbytes == 100


def test_one_copy_that_is_larger_than_all_is_not_waited_for() -> None:
    log: list[str] = []
    copies = PendingCopies(100)
    copies.add(_Copy("small", log), 10)
    copies.add(_Copy("large", log), 1000)
    assert log == ["small"] and copies.nbytes == 1000


def test_all_stores_of_a_device_share_the_bound() -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert pending_copies(first) is pending_copies(torch.device("cuda", 0))
    assert pending_copies(first) is not pending_copies(second)


def test_a_thread_that_waits_holds_up_no_other_and_every_byte_is_counted_once() -> None:
    copies, log = PendingCopies(100), []
    waiting, go_on = threading.Event(), threading.Event()

    class Slow(_Copy):
        def synchronize(self) -> None:
            waiting.set()
            assert go_on.wait(10)
            super().synchronize()

    copies.add(Slow("slow", log), 90)
    thread = threading.Thread(target=copies.add, args=(_Copy("next", log), 90))
    thread.start()
    assert waiting.wait(10)
    # Not below the bound, but it asks nobody to wait for a lock.
    assert copies.nbytes == 180
    third = threading.Thread(target=copies.add, args=(_Copy("third", log), 5))
    third.start()
    while copies.nbytes != 185:
        assert third.is_alive()
    go_on.set()
    for one in (thread, third):
        one.join(10)
    assert set(log) == {"slow"} and copies.nbytes == 95


def test_many_threads_leave_no_byte_behind() -> None:
    copies, log = PendingCopies(50), []

    def work() -> None:
        for _ in range(300):
            copies.add(_Copy("x", log), 7)
            assert copies.nbytes >= 0

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert copies.nbytes == 7 * len(copies._queue) <= 50
