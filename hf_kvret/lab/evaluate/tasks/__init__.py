"""The evaluation tasks, one a file."""

from hf_kvret.lab.evaluate.task import Task
from hf_kvret.lab.evaluate.tasks.agreement import Agreement
from hf_kvret.lab.evaluate.tasks.longgen import LongGeneration
from hf_kvret.lab.evaluate.tasks.multiturn import MultiTurn
from hf_kvret.lab.evaluate.tasks.niah import NeedleInHaystack
from hf_kvret.lab.evaluate.tasks.ppl import Perplexity
from hf_kvret.lab.evaluate.tasks.ruler import Ruler

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
