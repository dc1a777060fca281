"""LongBench v1 (Bai et al. 2023, arXiv 2308.14508): the English tasks, their data and scores."""

from hf_kvret.evaluation.longbench.data import LongData, LongSample, download
from hf_kvret.evaluation.longbench.prompting import LongPrompt, fill
from hf_kvret.evaluation.longbench.prompts import PROMPTS, read_prompts, split_template
from hf_kvret.evaluation.longbench.summary import score_bars, score_table
from hf_kvret.evaluation.longbench.tasks import BUCKETS, LONG_TASKS, LongTask, bucket

__all__ = [
    "BUCKETS",
    "LONG_TASKS",
    "PROMPTS",
    "LongData",
    "LongPrompt",
    "LongSample",
    "LongTask",
    "bucket",
    "download",
    "fill",
    "read_prompts",
    "score_bars",
    "score_table",
    "split_template",
]
