"""An index that names a token that there is not is told so by its own name, with every store."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import FlatKVCache
from hf_kvret.contracts.index import ColdTokens
from hf_kvret.methods.flat import FlatIndex
from hf_kvret.testing import COVERING_OPTIONS
from hf_kvret_kernels import host_step
from hf_kvret_kernels._dispatch import prefer
from hf_kvret_kernels.ids import WrongIdError

OPTIONS = COVERING_OPTIONS | {"top_k": 6}
# Wrong ids, of n tokens.
WRONG: dict[str, Callable[[int], int]] = {
    "n": lambda n: n,
    "most": lambda n: 2**31 - 1,
    "-2": lambda n: -2,
}


class AstrayIndex(FlatIndex):
    """The last id of the last row and head is wrong, from the second search on."""

    wrong: Callable[[int], int]
    searches = 0

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        ids = super().search(query, cold)
        self.searches += 1
        if self.searches > 1:
            ids[-1, -1, -1, -1] = self.wrong(len(cold))
        return ids


class AskingIndex(FlatIndex):
    """It asks the store for keys of tokens that there are not, before it searches."""

    wrong: Callable[[int], int]

    def before_search(self, cold: ColdTokens) -> None:
        heads = self._keys.rows.shape[1]
        cold.store.gather(
            torch.full((len(cold.valid), heads, 1, 2), self.wrong(len(cold)), dtype=torch.int32)
        )


def generate(
    model: PreTrainedModel, kind: type[FlatIndex], wrong: Callable[[int], int], store: str
) -> None:
    class Cache(FlatKVCache):
        name = "astray"

        @classmethod
        def make_index(cls, options: object, layer: int) -> FlatIndex:
            index = kind()
            index.wrong = wrong
            return index

    ids = torch.randint(3, 128, (2, 40), generator=torch.Generator().manual_seed(4))
    cache = Cache(model.config, **OPTIONS, store=store)
    model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)


@pytest.mark.factor("wrong", list(WRONG))
@pytest.mark.factor("store", ["device", "host", "cpu", "resident", "higgs"])
@pytest.mark.factor("way", ["as it is", "part by part", "torch"])
def test_it_is_named_with_what_it_returned(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, wrong: str, store: str, way: str
) -> None:
    if way == "part by part":
        monkeypatch.setattr(host_step, "library", lambda: None)
    context: AbstractContextManager[object] = prefer("naive") if way == "torch" else nullcontext()
    said = r"the index AstrayIndex\.search named id (-?\d+) of (\d+) tokens: allowed are 0 to "
    with context, pytest.raises(WrongIdError, match=said) as caught:
        generate(llama, AstrayIndex, WRONG[wrong], store)
    assert caught.value.number == WRONG[wrong](caught.value.count)
    # 40 tokens of the prompt, of which 8 are recent: the second search is of the second layer.
    assert caught.value.count == 32


@pytest.mark.parametrize("wrong", ["n", "-2"])
def test_so_is_one_that_asks_the_store(llama: PreTrainedModel, wrong: str) -> None:
    said = r"the index AskingIndex\.before_search named id "
    with pytest.raises(WrongIdError, match=said):
        generate(llama, AskingIndex, WRONG[wrong], "device")


def test_measured_recall_does_not_hide_it(llama: PreTrainedModel) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(WrongIdError, match=r"AstrayIndex\.search named id 32 of 32"),
    ):
        patch.setitem(OPTIONS, "track_recall", True)
        generate(llama, AstrayIndex, WRONG["n"], "device")
