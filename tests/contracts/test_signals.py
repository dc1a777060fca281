"""Signals wait for the end of a change, and interrupt everything else."""

import signal
import threading

import pytest

from hf_kvret.contracts.signals import SIGNALS_WAIT, interruptible


def test_a_signal_waits_for_the_end_of_a_change_and_a_second_one_does_not() -> None:
    done: list[str] = []
    with interruptible(signal.SIGINT, signal.SIGTERM):
        with pytest.raises(KeyboardInterrupt) as caught:
            with SIGNALS_WAIT:
                with SIGNALS_WAIT:
                    signal.raise_signal(signal.SIGTERM)
                    done.append("inner")
                done.append("outer")
            done.append("behind")
        assert done == ["inner", "outer"] and caught.value.args == (signal.SIGTERM,)
        with pytest.raises(KeyboardInterrupt), SIGNALS_WAIT:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("both")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert "both" not in done and not SIGNALS_WAIT.depth and not SIGNALS_WAIT.waiting


def test_handlers_of_others_stay() -> None:
    was = signal.getsignal(signal.SIGINT)
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        with interruptible(signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(signal.SIGTERM)
            assert signal.getsignal(signal.SIGINT) is not was
            # Handlers belong to the main thread.
            thread = threading.Thread(target=lambda: interruptible(signal.SIGINT).__enter__())
            thread.start()
            thread.join(60)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM] and signal.getsignal(signal.SIGINT) is was
