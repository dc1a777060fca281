"""ParisKV's mean keys: of blocks of the whole prompt, and taken anew as a context grows."""

import pytest
import torch

from hf_kvret import TokenBlock
from hf_kvret.contracts.state import Schema
from hf_kvret.methods.paris import ParisConfig, ParisIndex

from .codebooks import DIM, HEADS
from .index_runs import IndexRun

OPTIONS = ParisConfig(top_k=4)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 tokens at least, at most four of them when means are taken; a sample for each."""
    monkeypatch.setattr("hf_kvret.methods.paris.index._BLOCK", 16)
    monkeypatch.setattr("hf_kvret.methods.paris.index._BLOCKS", 4)
    monkeypatch.setattr("hf_kvret.methods.paris.index._SAMPLED", 16)
    monkeypatch.setattr("hf_kvret.methods.paris.index._ENOUGH", 8)


def _keys(length: int, drift: float = 1.0) -> torch.Tensor:
    """``[B, H, length, D]``, whose sums are exact in fp32; their mean moves along the text."""
    generator = torch.Generator().manual_seed(length)
    keys = torch.randint(-16, 17, (2, HEADS, length, DIM), generator=generator) / 8
    return keys + (drift * torch.arange(length) / length * 16).round()[:, None] / 8


def _add(run: IndexRun, keys: torch.Tensor) -> None:
    """More tokens, which are cold at once."""
    run.see(torch.zeros(2, HEADS, keys.shape[2], DIM), keys)
    run.flush(keys.shape[2])


def _unbuilt(
    keys: torch.Tensor, *cuts: int, valid: torch.Tensor | None = None, **changes: bool
) -> IndexRun:
    """A prompt in pieces that end at ``cuts``, all of it cold."""
    options = OPTIONS.replace(**changes)
    tokens = torch.zeros(2, HEADS, keys.shape[2], DIM), keys
    return IndexRun(lambda: ParisIndex(options)).prompt(tokens, valid, cuts, recent=0)


def _fed(keys: torch.Tensor, *cuts: int, valid: torch.Tensor | None = None) -> IndexRun:
    run = _unbuilt(keys, *cuts, valid=valid)
    run.ready()
    return run


def _same(index: ParisIndex, other: ParisIndex) -> bool:
    state, expected = index.state_dict(), other.state_dict()
    return state.keys() == expected.keys() and all(
        torch.equal(tensor, expected[name]) for name, tensor in state.items()
    )


@pytest.mark.parametrize("cuts", [(1,), (40,), (40, 41, 130)])
@pytest.mark.parametrize("padded", [False, True])
def test_a_prompt_in_pieces_has_the_codes_of_one_pass(cuts: tuple[int, ...], padded: bool) -> None:
    keys = _keys(170)
    valid = torch.ones(2, 170, dtype=torch.bool)
    valid[1, :50] = not padded
    mask = valid if padded else None
    whole = _fed(keys, valid=mask).index
    assert not _same(_unbuilt(keys, *cuts, valid=mask).index, whole), "or the test shows nothing"
    assert _same(_fed(keys, *cuts, valid=mask).index, whole)


def test_the_mean_is_taken_anew_once_the_context_has_doubled() -> None:
    keys = _keys(100)
    fed = _fed(keys[:, :, :50])
    for end in range(60, 101, 10):
        _add(fed, keys[:, :, end - 10 : end])
        before = fed.index.state_dict()
        fed.ready()
        renewed = fed.index.state_dict()["means"].shape != before["means"].shape
        assert renewed == (end == 100)
    assert _same(fed.index, _fed(keys).index)


def test_a_fork_keeps_its_codes_while_the_original_takes_others() -> None:
    keys = _keys(100)
    fed = _fed(keys[:, :, :50])
    _add(fed, keys[:, :, 50:])
    twin = fed.index.fork()
    before = {name: tensor.clone() for name, tensor in twin.state_dict().items()}
    fed.ready()
    assert all(torch.equal(tensor, before[name]) for name, tensor in twin.state_dict().items())
    # Now the twin renews, and the original, which has done so, is left alone.
    renewed = {name: tensor.clone() for name, tensor in fed.index.state_dict().items()}
    fed.index, original = twin, fed.index
    fed.ready()
    assert _same(twin, original)
    assert all(torch.equal(x, renewed[name]) for name, x in original.state_dict().items())


def test_each_block_has_the_mean_of_its_first_keys_and_the_newest() -> None:
    """Keys of a prompt, or of the flush that begins a block; padding takes those of a neighbour."""
    keys, valid = _keys(100), torch.ones(2, 100, dtype=torch.bool)
    valid[1, :35] = False
    fed = _fed(keys[:, :, :60], valid=valid[:, :60])
    _add(fed, keys[:, :, 60:70])
    _add(fed, keys[:, :, 70:])
    means, samples = (fed.index.state_dict()[name] for name in ("means", "samples"))
    spans = ((0, 16), (16, 32), (32, 48), (48, 60), (64, 70), (80, 96), (96, 100))
    assert means.shape == (2, HEADS, len(spans), DIM)
    for i, (start, end) in enumerate(spans):
        # Six keys, and then four, of eight that would be enough.
        share = min(1.0, (end - start) / 8)
        for row, part in ((0, slice(start, end)), (1, slice(max(start, 35), max(end, 48)))):
            last, own = means[row, :, i - 1], keys[row, :, part].mean(1)
            torch.testing.assert_close(means[row, :, i], last.lerp(own, share))
            # Keys of the second sequence begin with the token 35.
            newest = end - 1 if row == 0 or end > 35 else 35 + (end - 1) % 25
            assert torch.equal(samples[row, :, i], keys[row, :, newest])
    fed.crop(65)
    assert torch.equal(fed.index.state_dict()["means"], means[:, :, :5])
    assert torch.equal(fed.index.state_dict()["samples"], samples[:, :, :5])


def test_a_cache_that_was_saved_without_samples_gets_some_when_it_has_doubled() -> None:
    keys = _keys(100)
    fed = _fed(keys[:, :, :50])
    fed.index.load_state_dict(
        {name: x for name, x in fed.index.state_dict().items() if name != "samples"}
    )
    for end in range(60, 101, 10):
        _add(fed, keys[:, :, end - 10 : end])
        query = torch.ones(2, 2 * HEADS, 1, DIM)
        assert fed.index.search(query, fed.cold(4)).shape[-1] == 4
        assert "samples" not in fed.index.state_dict()
    fed.ready()
    assert _same(fed.index, _fed(keys).index)


def test_samples_are_saved_with_their_means() -> None:
    fed = _fed(_keys(60))
    state, schema = (
        fed.index.state_dict(),
        Schema(torch.float32, {"B": 2, "H": HEADS, "N": 60, "D": DIM}),
    )
    fed.index.check_saved(state, schema)
    with pytest.raises(ValueError, match="samples is"):
        fed.index.check_saved(state | {"samples": state["samples"][:, :, 1:]}, schema)
    for name in ("means", "factors"):
        del state[name]
    with pytest.raises(ValueError, match="means come with factors"):
        fed.index.check_saved(state, schema)


def test_padding_takes_keys_from_all_behind_it() -> None:
    """Also where the first pieces of a prompt have no key at all."""
    keys, valid = _keys(64), torch.ones(2, 64, dtype=torch.bool)
    valid[1, :34] = False
    samples = _unbuilt(keys, 16, 32, valid=valid).index.state_dict()["samples"]
    assert torch.equal(samples[0], keys[0][:, [15, 31, 47, 63]])
    assert torch.equal(samples[1], keys[1][:, [47, 63, 47, 63]])


def test_a_hole_is_no_sample() -> None:
    keys, valid = _keys(40), torch.ones(2, 40, dtype=torch.bool)
    valid[0, 14:16] = valid[:, 36:] = False
    samples = _fed(keys, valid=valid).index.state_dict()["samples"]
    assert torch.equal(samples[0], keys[0][:, [13, 31, 35]])
    assert torch.equal(samples[1], keys[1][:, [15, 31, 35]])


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("other", [False, True])
def test_a_sequence_may_begin_with_padding_alone(count: int, other: bool) -> None:
    """But for ``count`` tokens, which may be equal. Later ones are centered and scaled."""
    keys, valid = 16 * _keys(300) - 320.0, torch.ones(2, 300, dtype=torch.bool)
    valid[1, : 170 - count] = False
    if other:
        keys[1, :, 168] = keys[1, :, 169]
    fed = _fed(keys[:, :, :170], valid=valid[:, :170])
    _add(fed, keys[:, :, 170:])
    index = fed.index
    assert isinstance(index, ParisIndex) and index._means is not None
    # Tokens to 170 are padding.
    assert index._block_len == 64 and (index._means[1] / 16 + 20).abs().max() < 5
    weights = index._codes().weight[:, :, 192:].mean((1, 2, 3))
    assert 1 < weights[0] < 4 and weights[1] / weights[0] < 2 and weights[1] > 0.02


@pytest.mark.parametrize("why", ["coded rows", "no mean"])
def test_without_exact_keys_or_a_mean_codes_stay(why: str) -> None:
    keys = _keys(100)
    fed = _unbuilt(keys, 50, center=why != "no mean")
    fed.store.codes_rows = why == "coded rows"  # type: ignore[misc]
    before = fed.index.state_dict()
    fed.ready()
    after = fed.index.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if name != "mean_len")


def test_tokens_behind_a_crop_get_a_mean_of_their_own() -> None:
    """A shared prompt stays, another document follows in place of the first."""
    keys, others = _keys(100), _keys(100) - 5
    fed = _fed(keys)
    fed.crop(20)
    _add(fed, others[:, :, 20:])
    fed.ready()
    assert _same(fed.index, _fed(torch.cat([keys[:, :, :20], others[:, :, 20:]], dim=2)).index)


def test_what_queries_said_is_saved_before_rows_are_cold() -> None:
    index, queries, keys = ParisIndex(OPTIONS), torch.randn(2, 2 * HEADS, 9, DIM), _keys(64)
    queries[..., :3] *= 100.0
    index.on_prompt(queries, None)
    # One query is no prompt.
    index.on_prompt(queries[:, :, :1] * 0.0, None)
    loaded = ParisIndex(OPTIONS)
    loaded.load_state_dict(index.state_dict())
    for one in (index, loaded):
        one.add(TokenBlock(keys, keys, 0))
    assert index._factors is not None and loaded._factors is not None
    assert torch.equal(loaded._factors, index._factors)
    blank = ParisIndex(OPTIONS)
    blank.load_state_dict({})
    blank.add(TokenBlock(keys, keys, 0))
    assert blank._factors is not None and not torch.equal(blank._factors, index._factors)
