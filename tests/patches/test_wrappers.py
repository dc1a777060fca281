"""Wrappers beside those of other libraries: none is dropped, and each call is worked on once."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from hf_kvret_model_patches.wrappers import WrappedMethod, signature_with

Wrapping = Callable[[Callable[..., Any]], Callable[..., Any]]


@pytest.fixture
def cls() -> Any:
    """A class whose method says who worked on a call, the outermost first."""

    class Base:
        def speak(self, word: str) -> str:
            return word

    class Child(Base):
        """Inherits the method."""

    return Child


def ours(inner: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> str:
    return f"ours {inner(owner, *args, **kwargs)}"


def newer(inner: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> str:
    return f"newer {inner(owner, *args, **kwargs)}"


def with_wraps(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def traced(*args: Any, **kwargs: Any) -> Any:
        return f"theirs {inner(*args, **kwargs)}"

    return traced


def without_wraps(inner: Callable[..., Any]) -> Callable[..., Any]:
    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        return f"theirs {inner(self, *args, **kwargs)}"

    return traced


wrappings = pytest.mark.parametrize("wrap", [with_wraps, without_wraps])


def test_a_hook_works_on_every_call_and_is_replaced_and_taken_away(cls: Any) -> None:
    base = cls.__mro__[1]
    plain, speech = base.speak, WrappedMethod(cls, "speak")
    speech.restore()
    for hook, expected in ((ours, "ours hi"), (newer, "newer hi")):
        speech.apply(hook)
        assert cls().speak(word="hi") == base().speak("hi") == expected
    assert base.speak.__wrapped__ is plain and base.speak.__name__ == "speak"
    assert "speak" not in vars(cls), "the wrapper stands where the method does"
    for _ in range(2):
        speech.restore()
        assert base.speak is plain


@wrappings
def test_what_another_library_wrapped_since_stays(wrap: Wrapping, cls: Any) -> None:
    base, speech = cls.__mro__[1], WrappedMethod(cls, "speak")
    speech.apply(ours)
    base.speak = theirs = wrap(base.speak)
    speech.restore()
    assert base.speak is theirs and cls().speak("hi") == "theirs hi"
    # Again around theirs, where ours is not to be seen; and each call is worked on once.
    speech.apply(newer)
    assert cls().speak("hi") == ("theirs newer hi" if wrap is with_wraps else "newer theirs hi")
    speech.apply(ours)
    assert cls().speak("hi") == ("theirs ours hi" if wrap is with_wraps else "ours theirs hi")
    speech.restore()
    assert cls().speak("hi") == "theirs hi"


def test_a_wrapper_that_another_hides_passes_calls_on_once_there_is_a_new_one(cls: Any) -> None:
    base, speech = cls.__mro__[1], WrappedMethod(cls, "speak")
    speech.apply(ours)
    base.speak = without_wraps(base.speak)
    speech.apply(newer)
    assert cls().speak("hi") == "newer theirs hi"


@wrappings
@pytest.mark.parametrize("ours_first", [True, False])
def test_wrappers_from_before_go_in_any_order(wrap: Wrapping, ours_first: bool, cls: Any) -> None:
    base = cls.__mro__[1]
    plain = base.speak
    base.speak = theirs = wrap(plain)
    speech = WrappedMethod(cls, "speak")
    speech.apply(ours)
    assert cls().speak("hi") == "ours theirs hi"
    if ours_first:
        speech.restore()
        assert base.speak is theirs
        base.speak = plain
    else:
        base.speak = plain
        speech.restore()
    assert base.speak is plain
    speech.apply(newer)
    assert cls().speak("hi") == "newer hi"


def test_a_class_with_a_method_of_its_own_calls_the_wrapper_by_super(cls: Any) -> None:
    WrappedMethod(cls, "speak").apply(ours)

    class Own(cls):
        def speak(self, word: str) -> str:
            return "own " + super().speak(word)

    assert Own().speak("hi") == "own ours hi"


def test_parameters_are_named_through_wrappers_of_others(cls: Any) -> None:
    speak = with_wraps(cls.speak)
    assert list(signature_with(speak, "word").parameters) == ["self", "word"]
    assert list(signature_with(lambda x: x, "word").parameters) == ["x"]
