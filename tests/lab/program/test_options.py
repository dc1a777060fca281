"""Options declared as fields: what argparse is told, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hf_kvret.lab.program.arguments import known_names, lengths, one_or_both, whole_number
from hf_kvret.lab.program.options import add_options, option, read_options
from hf_kvret.lab.program.program import Parser


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of several commands."""

    seed: int = option(42, "of all random numbers", kind=whole_number(0))


@dataclass(frozen=True, kw_only=True)
class Walk(Common):
    """One of them."""

    model: str = option(help="a folder")
    context: tuple[int, ...] = option((4096,), "tokens", kind=lengths)
    new_tokens: int = option(8, "after each")
    questions: tuple[str, ...] = option(("inside",), kind=one_or_both("inside", "after"))
    tasks: tuple[str, ...] = option((), kind=known_names(("qa", "vt")))
    slow: bool = option(False, "take your time")
    style: str | None = option(None, "of words", choices=("plain", "rich"))
    modes: str = option("one", "how", name="--mode")
    quiet: bool = False
    """No option: not on the command line."""


@dataclass(frozen=True)
class Look:
    """A command with something that is named without dashes."""

    artifact: str = option(help="a folder", name="artifact")


def parse(kind: type, *words: str) -> object:
    parser = Parser()
    add_options(parser, kind)
    return read_options(kind, parser.parse_args(words))


def test_values_are_made_by_their_kinds_and_defaults_are_those_of_the_fields() -> None:
    assert parse(Walk, "--model", "m") == Walk(model="m")
    words = ["--model", "m", "--seed", "0", "--context", "1K,2K", "--new-tokens", "9", "--slow"]
    words += ["--questions", "both", "--tasks", "vt", "--style", "rich", "--mode", "two"]
    assert parse(Walk, *words) == Walk(
        model="m",
        seed=0,
        context=(1024, 2048),
        new_tokens=9,
        slow=True,
        questions=("inside", "after"),
        tasks=("vt",),
        style="rich",
        modes="two",
    )
    assert parse(Look, "here") == Look("here")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: --model"),
        (["--model", "m", "--seed", "-1"], "argument --seed: '-1' is no whole number from 0"),
        (["--model", "m", "--questions", "x"], "--questions: 'x': choose inside, after or both"),
        (["--model", "m", "--tasks", "vt,x"], "--tasks: unknown: x; choose among qa, vt"),
        (["--model", "m", "--tasks", "vt,vt"], "--tasks: the same name twice in 'vt,vt'"),
        (["--model", "m", "--quiet"], "unrecognized arguments: --quiet"),
    ],
)
def test_mistakes_name_the_option(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(Walk, *words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
