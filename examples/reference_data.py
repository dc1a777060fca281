"""What the reference model learns from: plain text, and needle documents in natural language.

Text comes as ``*.jsonl.xz`` files, one JSON document a line with ``source, split, title, text``.
Needle documents are made here: a haystack, facts hidden between its sentences, and questions whose
answers restate the fact. Answers to RULER's wording are given as ``for KEY is: VALUE``, the
needle's own words, because repeating the key turns a search into copying, which small models learn.
"""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import numpy as np
import wonderwords
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

# Shares of the training tokens. Wikipedia weighs most: WikiText-2 is the perplexity that people
# quote. Essays are the haystack of the needle tasks.
SOURCES = {
    "wikipedia_featured_2019": 0.42,
    "wikipedia_good_2019": 0.14,
    "novels100": 0.14,
    "openstax": 0.12,
    "standardebooks": 0.10,
    "eltec_eng": 0.06,
    "us_speeches": 0.02,
}
# Words with their leading blank, numbers in pairs of digits, punctuation, white space.
SPLIT = (
    r"'(?:s|t|re|ve|m|ll|d)| ?\p{N}{1,2}| ?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
FACTS = (
    ("The {thing} of {name} is {value}.", "What is the {thing} of {name}?"),
    ("{name} wrote down the {thing} as {value}.", "What did {name} write down as the {thing}?"),
    ("Remember that {name} has the {thing} {value}.", "Which {thing} does {name} have?"),
    (
        "In the file on {name}, the {thing} is {value}.",
        "In the file on {name}, what is the {thing}?",
    ),
)
THINGS = ("locker code", "room number", "case number", "badge number", "account number", "password")
RULER_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
RULER_ASK = (
    "What are all the special magic {kind} for {keys} mentioned in the provided text? "
    "The special magic {kind} for {keys} mentioned in the provided text are"
)
RULER_ASK_ONE = (
    "What is the special magic {kind} for {keys} mentioned in the provided text? "
    "The special magic {kind} for {keys} mentioned in the provided text is"
)


def read_documents(folder: Path, source: str, split: str) -> Iterator[str]:
    """Texts of one source and split, in the file's order."""
    path = folder / f"{source}.jsonl.xz"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: --data must hold {', '.join(SOURCES)}.jsonl.xz"
        )
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)
            if document["split"] == split:
                yield document["text"]


def train_tokenizer(folder: Path, vocab_size: int, megabytes: float) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ``<s>`` (0), ``</s>`` (1) and padding (2)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # Every pair of digits must be a token, also those that the text never has.
    numbers = [f"{blank}{number:02d}" for blank in ("", "x ") for number in range(100)] * 2000

    def texts() -> Iterator[str]:
        yield from (" ".join(numbers[i : i + 500]) for i in range(0, len(numbers), 500))
        for source, share in SOURCES.items():
            left = share * megabytes * 1e6
            for text in read_documents(folder, source, "train"):
                yield text[: int(left)]
                left -= len(text)
                if left <= 0:
                    break

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=131_072,
        clean_up_tokenization_spaces=False,
    )


def encode_texts(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    split: str,
    tokens: int,
    seed: int,
    sources: Mapping[str, float] = SOURCES,
    unread: bool = False,
) -> dict[str, np.ndarray]:
    """About ``tokens`` token ids (uint16) by source; each document starts with ``<s>``.

    Documents longer than 200,000 characters (books) are cut into such pieces, and all are shuffled.
    ``unread`` takes the last pieces: none that a model of the same seed had, while both together
    need less than there is.
    """
    encoded: dict[str, np.ndarray] = {}
    with tqdm(total=tokens, unit="tok", unit_scale=True, desc=f"tokens of {split}") as bar:
        for source, share in sources.items():
            pieces = [
                text[start : start + 200_000]
                for text in read_documents(folder, source, split)
                for start in range(0, len(text), 200_000)
            ]
            random.Random(seed).shuffle(pieces)
            if unread:
                pieces.reverse()
            limit, chunks, length = share * tokens, [], 0
            for piece in pieces:
                ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
                chunks.append(np.array([tokenizer.bos_token_id, *ids], dtype=np.uint16))
                length += len(chunks[-1])
                bar.update(len(chunks[-1]))
                if length >= limit:
                    break
            if chunks:
                encoded[source] = np.concatenate(chunks)
    return encoded


@dataclass(frozen=True)
class Row:
    """One training row: token ids, where positions may jump, and what counts as an answer.

    Attributes:
        tokens: ``[length]`` int64.
        boundaries: sorted indices where the position may jump ahead.
        is_answer: ``[length]`` bool.
    """

    tokens: np.ndarray
    boundaries: np.ndarray
    is_answer: np.ndarray


class NeedleRows:
    """Makes needle documents of a wanted length out of encoded haystack text."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, text: dict[str, np.ndarray], seed: int
    ) -> None:
        self.bos, self.text = tokenizer.bos_token_id, text
        self.rng = random.Random(seed)
        words = Path(wonderwords.__file__).parent / "assets"
        self.adjectives = (words / "adjectivelist.txt").read_text().split("\n")
        self.nouns = (words / "nounlist.txt").read_text().split("\n")
        self.names = [noun.capitalize() for noun in self.nouns if noun.isalpha() and len(noun) < 9]
        self._encode: Callable[[str], list[int]] = lambda string: tokenizer(
            string, add_special_tokens=False
        )["input_ids"]
        ends = {f"{mark}{tail}" for mark in ".!?" for tail in ("", "\n", "\n\n", '"', '"\n\n')}
        self.ends_sentence = np.array(
            [tokenizer.decode([i]) in ends for i in range(len(tokenizer))], dtype=bool
        )
        self.noise = self._encode(NOISE)

    def row(self, length: int, needles: int) -> Row:
        """A row of exactly ``length`` tokens with up to ``needles`` facts, most of them asked."""
        rng = self.rng
        haystack = rng.choices(("text", "noise", "needles"), (0.6, 0.15, 0.25))[0]
        facts, turns = (self._natural if rng.random() < 0.25 else self._ruler)(needles, haystack)
        asked = [self._turn(question, answer) for question, answer in turns]
        lines = [self._encode(f" {fact}" if haystack == "text" else f"{fact}\n") for fact in facts]
        facts_len = sum(map(len, lines))
        while len(asked) > 1 and length - sum(len(turn) for turn, _ in asked) < 1.5 * facts_len:
            asked.pop()
        body_len = length - 1 - sum(len(turn) for turn, _ in asked)
        if body_len < 1.2 * facts_len:
            return self.row(length, max(1, needles - 1))
        hay = self._haystack(haystack, body_len - facts_len)
        body, starts = self._insert(hay, lines, haystack)
        tokens, is_answer = [self.bos, *body], [False] * (1 + len(body))
        boundaries = [start + 1 for start in starts]
        for turn, answer in asked:
            boundaries.append(len(tokens))
            tokens += turn
            is_answer += answer
        # A piece of text may end before the haystack is long enough.
        short = length - len(tokens)
        tokens += self.noise[:1] * short
        is_answer += [False] * short
        return Row(
            np.array(tokens, dtype=np.int64),
            np.unique(np.array(boundaries, dtype=np.int64)),
            np.array(is_answer, dtype=bool),
        )

    def _turn(self, question: str, answer: str) -> tuple[list[int], list[bool]]:
        question_ids, answer_ids = self._encode(f"\n{question}"), self._encode(answer)
        is_answer = [False] * len(question_ids) + [True] * len(answer_ids)
        return question_ids + answer_ids, is_answer

    def _natural(self, needles: int, haystack: str) -> tuple[list[str], list[tuple[str, str]]]:
        rng, facts, turns = self.rng, [], []
        names = rng.sample(self.names, needles)
        for name in names:
            fact, question = rng.choice(FACTS)
            words = {"name": f"{name} {rng.choice(self.names)}", "thing": rng.choice(THINGS)}
            fact = fact.format(value=self._value(rng.choice(("numbers", "words"))), **words)
            facts.append(fact)
            turns.append((f"Question: {question.format(**words)} Answer:", f" {fact}"))
        rng.shuffle(turns)
        return facts, turns

    def _ruler(self, needles: int, haystack: str) -> tuple[list[str], list[tuple[str, str]]]:
        rng = self.rng
        kind = rng.choices(("numbers", "uuids", "words"), (0.7, 0.2, 0.1))[0]
        key_kind = "uuids" if kind == "uuids" and rng.random() < 0.5 else "words"
        per_key = rng.choice((2, 3, 4)) if rng.random() < 0.15 else 1
        keys = [self._value(key_kind) for _ in range(max(1, needles // per_key))]
        pairs = [(key, self._value(kind)) for key in keys for _ in range(per_key)]
        rng.shuffle(pairs)
        facts = [RULER_NEEDLE.format(kind=kind, key=key, value=value) for key, value in pairs]
        order, turns = rng.sample(keys, len(keys)), []
        while order:
            count = min(len(order), rng.choice((2, 3, 4)) if rng.random() < 0.15 else 1)
            chosen, order = order[:count], order[count:]
            one = count * per_key == 1
            text = (RULER_ASK_ONE if one else RULER_ASK).format(
                kind=kind[:-1] if one else kind, keys=_listed(chosen)
            )
            answers = [
                f" for {key} is: {_listed([v for k, v in pairs if k == key])}" for key in chosen
            ]
            turns.append((text, ";".join(answers) + "."))
        return facts, turns

    def _value(self, kind: str) -> str:
        if kind == "numbers":
            return str(self.rng.randint(1_000_000, 9_999_999))
        if kind == "uuids":
            return str(UUID(int=self.rng.getrandbits(128), version=4))
        return f"{self.rng.choice(self.adjectives)}-{self.rng.choice(self.nouns)}"

    def _haystack(self, kind: str, length: int) -> list[int]:
        if kind == "noise":
            return (self.noise * (length // len(self.noise) + 1))[:length]
        if kind == "needles":
            lines: list[int] = []
            value = self.rng.choice(("numbers", "numbers", "uuids"))
            key = value if value == "uuids" else "words"
            while len(lines) < length:
                words = {"kind": value, "key": self._value(key), "value": self._value(value)}
                lines += self._encode(RULER_NEEDLE.format(**words) + "\n")
            return lines[:length]
        source = "standardebooks" if self.rng.random() < 0.6 else self.rng.choice(list(self.text))
        tokens = self.text[source]
        start = self.rng.randrange(max(1, len(tokens) - length))
        return tokens[start : start + length].tolist()

    def _insert(
        self, hay: list[int], lines: list[list[int]], kind: str
    ) -> tuple[list[int], list[int]]:
        """The haystack with the lines at random sentence ends, and where they begin."""
        marks = np.flatnonzero(self.ends_sentence[np.array(hay, dtype=np.int64)]) + 1
        if kind == "needles" or not len(marks):
            starts = np.flatnonzero(np.array(hay) == self.noise[-1]) + 1
            marks = starts if len(starts) else np.array([len(hay)])
        places = np.sort(self.rng.choices(marks.tolist(), k=len(lines)))
        body, starts, last = [], [], 0
        for place, line in zip(places, lines, strict=True):
            body += hay[last:place]
            starts.append(len(body))
            body += line
            last = int(place)
        return body + hay[last:], starts


def _listed(items: list[str]) -> str:
    if len(items) == 1:
        return items[0]
    return ", ".join(items[:-1]) + f", and {items[-1]}"
