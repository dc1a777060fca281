"""LongBench's prompts, and templates of a user's own.

The 16 templates are quoted word for word, as a match needs: THUDM/LongBench at 2e00731,
LongBench/config/dataset2prompt.json, Copyright (c) 2023 THU-KEG & Zhipu AI, MIT licence. Its slips
("asconcisely", a blank before a line break) are part of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from string import Formatter

_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not "
    "output any other words.\n\nThe following are given passages.\n{context}\n\nAnswer the "
    "question based on the given passages. Only give me the answer and do not output any "
    "other words.\n\nQuestion: {input}\nAnswer:"
)

PROMPTS: dict[str, str] = {
    "narrativeqa": (
        "You are given a story, which can be either a novel or a movie script, and a question. "
        "Answer the question asconcisely as you can, using a single phrase if possible. Do not "
        "provide any explanation.\n\nStory: {context}\n\nNow, answer the question based on the "
        "story asconcisely as you can, using a single phrase if possible. Do not provide any "
        "explanation.\n\nQuestion: {input}\n\nAnswer:"
    ),
    "qasper": (
        "You are given a scientific article and a question. Answer the question as concisely as "
        "you can, using a single phrase or sentence if possible. If the question cannot be "
        'answered based on the information in the article, write "unanswerable". If the question '
        'is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide any '
        "explanation.\n\nArticle: {context}\n\n Answer the question based on the above article as "
        "concisely as you can, using a single phrase or sentence if possible. If the question "
        'cannot be answered based on the information in the article, write "unanswerable". If the '
        'question is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide any '
        "explanation.\n\nQuestion: {input}\n\nAnswer:"
    ),
    "multifieldqa_en": (
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
        "question based on the above text, only give me the answer and do not output any other "
        "words.\n\nQuestion: {input}\nAnswer:"
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "gov_report": (
        "You are given a report by a government agency. Write a one-page summary of the "
        "report.\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:"
    ),
    "qmsum": (
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the "
        "query based on the above meeting transcript in one or more sentences.\n\nQuery: {input}\n"
        "Answer:"
    ),
    "multi_news": (
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
        "{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:"
    ),
    "trec": (
        "Please determine the type of the question below. Here are some examples of questions.\n\n"
        "{context}\n{input}"
    ),
    "triviaqa": (
        "Answer the question based on the given passage. Only give me the answer and do not "
        "output any other words. The following are some examples.\n\n{context}\n\n{input}"
    ),
    "samsum": (
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
        "{context}\n\n{input}"
    ),
    "passage_count": (
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
        "Please carefully read these paragraphs and determine how many unique paragraphs there "
        "are after removing duplicates. In other words, how many non-repeating paragraphs are "
        "there in total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after "
        "removing duplicates. The output format should only contain the number, such as 1, 2, 3, "
        "and so on.\n\nThe final answer is: "
    ),
    "passage_retrieval_en": (
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
        "paragraph the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n"
        "{input}\n\nPlease enter the number of the paragraph that the abstract is from. The "
        'answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: '
    ),
    "lcc": "Please complete the code given below. \n{context}Next line of code:\n",
    "repobench-p": "Please complete the code given below. \n{context}{input}Next line of code:\n",
}


def read_prompts(path: Path) -> dict[str, str]:
    """Templates by task from a JSON file like LongBench's dataset2prompt.json.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not JSON, no object of strings, or a template of a known task that has not
            exactly one ``{context}``, or has fields besides it and ``{input}``.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--prompts {path}: no such file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"--prompts {path}: not JSON ({error})") from error
    if not isinstance(content, dict) or not all(isinstance(v, str) for v in content.values()):
        raise ValueError(f"--prompts {path}: write a JSON object of templates by task")
    for task in PROMPTS:
        if task in content:
            _check(f"--prompts {path}, {task}", content[task])
    return content


def split_template(template: str) -> tuple[str, str]:
    """The template up to the end of ``{context}``, and what follows it."""
    before, field, after = template.partition("{context}")
    return before + field, after


def _check(where: str, template: str) -> None:
    try:
        fields = [field for _, field, _, _ in Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise ValueError(f"{where}: no template ({error})") from error
    if fields.count("context") != 1 or "{context}" not in template:
        raise ValueError(f"{where}: write {{context}} exactly once")
    unknown = sorted({*fields} - {"context", "input"})
    if unknown:
        raise ValueError(
            f"{where}: unknown field {unknown[0]!r}, allowed: context, input; double a brace that "
            "is meant as such"
        )
    if not split_template(template)[1]:
        raise ValueError(f"{where}: something must follow {{context}}, as Answer:")
