"""RULER: 13 tasks that hide what is asked for in a context of any length.

Hsieh et al. 2024, arXiv 2404.06654; templates, random draws and scores follow the repository
NVIDIA/RULER (Apache-2.0).
"""

from hf_kvret.lab.evaluate.ruler.prompts import generate
from hf_kvret.lab.evaluate.ruler.task import TASKS, Sample, sample_score
from hf_kvret.lab.evaluate.ruler.texts import RulerData

__all__ = ["TASKS", "RulerData", "Sample", "generate", "sample_score"]
