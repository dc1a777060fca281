"""RULER: 13 tasks that hide what is asked for in a context of any length.

Hsieh et al. 2024, arXiv 2404.06654; templates, random draws and scores follow the repository
NVIDIA/RULER (Apache-2.0). ``generate`` makes a task's samples for a tokenizer and a length,
``score`` rates the answers.
"""

from hf_kvret.evaluation.ruler.data import RulerData
from hf_kvret.evaluation.ruler.generation import Tokenizer, generate
from hf_kvret.evaluation.ruler.metrics import sample_score, score
from hf_kvret.evaluation.ruler.sentences import sentence_splitter
from hf_kvret.evaluation.ruler.task import TASKS, RulerTask, Sample

__all__ = [
    "TASKS",
    "RulerData",
    "RulerTask",
    "Sample",
    "Tokenizer",
    "generate",
    "sample_score",
    "score",
    "sentence_splitter",
]
