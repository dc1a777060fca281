"""The evaluation tasks, one a file."""

from hf_kvret.evaluation.task import Task
from hf_kvret.evaluation.tasks.agreement import Agreement
from hf_kvret.evaluation.tasks.longgen import LongGeneration
from hf_kvret.evaluation.tasks.multiturn import MultiTurn
from hf_kvret.evaluation.tasks.niah import NeedleInHaystack
from hf_kvret.evaluation.tasks.ppl import Perplexity
from hf_kvret.evaluation.tasks.ruler import Ruler

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        Perplexity,
        Ruler,
        NeedleInHaystack,
        MultiTurn,
        Agreement,
        LongGeneration,
    )
}
