"""Wrappers beside those of other libraries: none is dropped, and each call is worked on once."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest

from hf_kvret_model_patches import wrappers
from hf_kvret_model_patches.wrappers import WrappedFunction, find_wrapper, once, signature_with

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


ALL: list[Wrapping] = [with_wraps, without_wraps]


def test_a_hook_works_on_every_call_and_is_replaced_and_taken_away(cls: Any) -> None:
    base = cls.__mro__[1]
    plain, speech = base.speak, WrappedFunction(cls, "speak")
    speech.restore()
    for hook, expected in ((ours, "ours hi"), (newer, "newer hi")):
        speech.apply(hook)
        assert cls().speak(word="hi") == base().speak("hi") == expected
    assert base.speak.__wrapped__ is plain and base.speak.__name__ == "speak"
    assert "speak" not in vars(cls), "the wrapper stands where the function does"
    for _ in range(2):
        speech.restore()
        assert base.speak is plain


@pytest.mark.parametrize("wrap", ALL)
def test_what_another_library_wrapped_since_stays(wrap: Wrapping, cls: Any) -> None:
    speech = WrappedFunction(cls, "speak")
    speech.apply(ours)
    cls.speak = theirs = wrap(cls.speak)
    speech.restore()
    assert cls.speak is theirs and cls().speak("hi") == "theirs hi"
    speech.apply(once(newer))
    assert sorted(cls().speak("hi").split()) == ["hi", "newer", "theirs"]


def test_a_wrapper_that_is_in_the_chain_is_not_put_there_again(cls: Any) -> None:
    speech = WrappedFunction(cls, "speak")
    speech.apply(ours)
    first = find_wrapper(cls.speak)
    cls.speak = theirs = with_wraps(with_wraps(cls.speak))
    for hook, word in ((ours, "ours"), (newer, "newer")):
        speech.apply(hook)
        assert cls.speak is theirs and find_wrapper(cls.speak) is first
        assert cls().speak("hi") == f"theirs theirs {word} hi"


def test_two_wrappers_in_a_chain_work_once(cls: Any) -> None:
    speech = WrappedFunction(cls, "speak")
    speech.apply(once(ours))
    inner = cls.speak
    cls.speak = without_wraps(cls.speak)
    speech.apply(once(ours))
    assert cls().speak("hi") == "ours theirs hi"
    # The other library puts back what it found.
    cls.speak = inner
    assert cls().speak("hi") == "ours hi"


def test_a_call_within_a_call_is_worked_on_too(cls: Any) -> None:
    speech = WrappedFunction(cls, "speak")
    cls.__mro__[1].speak = lambda self, word: (
        f"[{self.draft.speak(word)}] {word}" if self.draft else word
    )
    speech.apply(once(ours))
    cls.speak = without_wraps(cls.speak)
    speech.apply(once(ours))
    model, draft = cls(), cls()
    model.draft, draft.draft = draft, None
    assert model.speak("hi") == "ours theirs [ours theirs hi] hi"


def test_a_call_that_failed_leaves_nothing_behind(cls: Any) -> None:
    speech = WrappedFunction(cls, "speak")
    speech.apply(once(ours))
    speaker = cls()
    with pytest.raises(TypeError, match="argument"):
        speaker.speak()
    assert speaker.speak("hi") == "ours hi"


@pytest.mark.parametrize("wrap", ALL)
@pytest.mark.parametrize("ours_first", [True, False])
def test_wrappers_from_before_us_go_in_any_order(
    wrap: Wrapping, ours_first: bool, cls: Any
) -> None:
    base = cls.__mro__[1]
    plain = base.speak
    base.speak = theirs = wrap(plain)
    speech = WrappedFunction(cls, "speak")
    speech.apply(once(ours))
    assert cls().speak("hi") == "ours theirs hi"
    if ours_first:
        speech.restore()
        assert base.speak is theirs
        base.speak = plain
    else:
        base.speak = plain
        speech.restore()
    assert base.speak is plain
    speech.apply(once(newer))
    assert cls().speak("hi") == "newer hi"


def test_a_subclass_that_kept_the_wrapper_is_served_after_a_restore_and_not_twice(cls: Any) -> None:
    speech = WrappedFunction(cls.__mro__[1], "speak")
    speech.apply(once(ours))
    cls.speak = with_wraps(cls.speak)
    speech.restore()
    assert cls().speak("hi") == "theirs hi"
    speech.apply(once(newer))
    assert cls().speak("hi") == "theirs newer hi"
    assert cls.__mro__[1]().speak("hi") == "newer hi"


def test_a_class_with_a_method_of_its_own_calls_the_wrapper_by_super(cls: Any) -> None:
    WrappedFunction(cls, "speak").apply(ours)

    class Own(cls):
        def speak(self, word: str) -> str:
            return "own " + super().speak(word)

    assert Own().speak("hi") == "own ours hi"


def test_the_module_loaded_anew_finds_its_older_wrapper(cls: Any) -> None:
    plain = cls.speak
    WrappedFunction(cls, "speak").apply(ours)
    module = importlib.reload(wrappers)
    speech = module.WrappedFunction(cls, "speak")
    speech.apply(newer)
    assert cls().speak("hi") == "newer hi"
    speech.restore()
    assert cls.speak is plain


def test_functions_of_a_module_are_wrapped_in_its_globals() -> None:
    names: dict[str, Any] = {}
    exec("def rotate(x): return x\ndef attend(x): return rotate(x)", names)
    plain = names["rotate"]
    rotation = WrappedFunction(names, "rotate")
    rotation.apply(ours)
    assert names["attend"]("x") == "ours x"
    rotation.restore()
    assert names["rotate"] is plain


def test_parameters_are_named_through_wrappers_of_others(cls: Any) -> None:
    speak = with_wraps(cls.speak)
    assert list(signature_with(speak, "word").parameters) == ["self", "word"]


def test_a_function_without_the_parameter_has_its_own_signature() -> None:
    assert list(signature_with(lambda x: x, "word").parameters) == ["x"]
