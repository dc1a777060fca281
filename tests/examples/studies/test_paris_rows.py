"""The study of long rows: what it compares is what it says, and what it found holds here too."""

from __future__ import annotations

from pathlib import Path

import paris_rows
import pytest
import torch
from paris_rows import SIX, THREE, Rows, drawn_rows, equal_reading, main, model_rows, recalls

from hf_kvret import ParisConfig


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Whose rotated keys decide."""
    return drawn_rows((512, 64), 1200, ratio=10.0, seed=0)


def test_drawn_scores_have_the_ratio_that_was_asked_for(rows: Rows) -> None:
    latent, rope = (
        rows.queries[:, part] @ rows.keys[:, part].T for part in (slice(512), slice(512, None))
    )
    assert rope.std() / latent.std() == pytest.approx(10.0, rel=1e-3)


def test_the_tiers_are_those_of_the_method() -> None:
    assert ParisConfig().tiers_for(42) == SIX and len(SIX) == 6
    assert ParisConfig().tiers_for(72) == THREE and set(THREE) < set(SIX)


def test_blocks_need_mixing_where_the_parts_of_a_row_differ(rows: Rows) -> None:
    found = {rotation: recalls(rows, rotation, THREE)[0] for rotation in ("blocks", "mixed blocks")}
    assert found["mixed blocks"] > found["blocks"] + 0.2


def test_three_tiers_find_as_much_as_six_in_16_bits(rows: Rows) -> None:
    three, six = (recalls(rows, "mixed blocks", tiers)[1] for tiers in (THREE, SIX))
    assert three > six - 0.02


def test_in_the_bytes_of_padded_codes_blocks_find_more(rows: Rows) -> None:
    assert equal_reading(576) == pytest.approx((1024 * 0.2 / 576 - 0.125) / 0.75)
    padded, _ = recalls(rows, "padded", SIX)
    _, blocks = recalls(rows, "mixed blocks", THREE, equal_reading(576))
    assert blocks > padded + 0.1


def test_rows_of_a_model_are_its_latents_and_rotated_keys() -> None:
    (found,) = model_rows(150)
    assert found.keys.shape == (150, 576) and found.queries.shape == (4 * 8, 576)
    # A latent is normalized: its mean square is 1, but for the learned scale.
    assert found.keys[:, :512].square().mean() == pytest.approx(1.0, rel=0.5)


def test_everything_is_found_among_all(rows: Rows) -> None:
    first, second = recalls(rows, "mixed blocks", THREE, beta=1.0)
    assert first == 1.0 and second > 0.9


def test_the_page_has_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paris_rows, "table", lambda tokens, seeds: iter([[str(tokens)] * 9]))
    assert main(["--tokens", "77", "--page", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "| 77 " in page and "python examples/studies/paris_rows.py" in page
    assert torch.isfinite(torch.tensor(equal_reading(160)))
