"""Two ranks, each with a part of the heads: the text of one process, or an error on both."""

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from hf_kvret.lab.calibrate.tiny import tiny_artifact
from hf_kvret.testing import COVERING_OPTIONS, LATENT_MODELS, TinyModel
from hf_kvret.testing.models import small_config
from hf_kvret.testing.ranks import RankCase, RankOutcome, run_on_ranks

from .rank_plays import SMALL

pytest.importorskip("accelerate", reason="transformers spreads a model with accelerate")

PLAYS = Path(__file__).with_name("rank_plays.py")
SIZES = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
CODEC = {"predictor": "none", "first_bits": 4, "recent": 8, "flush": 4, "dense_below": 0}
LLAMA = TinyModel("four heads", small_config("llama", **SIZES), (0, 1))


def failures(cases: list[RankCase], outcomes: list[RankOutcome]) -> list[str]:
    pairs = zip(cases, outcomes, strict=True)
    return [f"{case}: {outcome.detail}" for case, outcome in pairs if not outcome.equal]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return LLAMA.build()


@pytest.fixture(scope="module")
def artifacts(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("artifacts")
    return {method: tiny_artifact(model, method, folder / method) for method in ("a2ats", "aqua")}


def test_two_ranks_give_what_one_process_gives(
    model: PreTrainedModel, artifacts: dict[str, str]
) -> None:
    """All of it in one spawn, which is most of the time."""
    cases = [
        *(RankCase("paris", f"{PLAYS}:{name}", SMALL) for name in ("saved", "a_shelf")),
        RankCase("paris", "beams_ragged", COVERING_OPTIONS),
        RankCase(
            "a2ats", "second_turn_ragged", {**COVERING_OPTIONS, "artifact": artifacts["a2ats"]}
        ),
        RankCase("paris", "second_turn", {**SMALL, "rest": "mean", "store": "host"}),
    ]
    refused = RankCase("aqua", "greedy", {"artifact": artifacts["aqua"]})
    coded = RankCase("aqua", "second_turn", CODEC)
    *outcomes, aqua, codec = run_on_ranks(model, [*cases, refused, coded], ranks=2)
    assert failures(cases, outcomes) == []
    # A code is of all heads that a rank has: other tokens than in one process, or the same.
    assert codec.alike and (codec.equal or codec.detail.startswith("rank 0: ")), codec.detail
    assert "refused: " in aqua.detail and "pass predictor='none'" in aqua.detail


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v2", "glm4_moe_lite"])
def test_ranks_share_the_rows_of_latents(family: str) -> None:
    """One selection serves all heads of a latent, those of other ranks too: it has to cover all."""
    model = LATENT_MODELS[family].build()
    cases = [
        *(RankCase(x, "second_turn", COVERING_OPTIONS) for x in ("flat", "paris", "lrqk", "h2o")),
        RankCase("latent", "second_turn", {"recent": 8, "flush": 4}),
        RankCase("flat", f"{PLAYS}:latent_weight", COVERING_OPTIONS),
    ]
    assert failures(cases, run_on_ranks(model, cases, ranks=2)) == []
