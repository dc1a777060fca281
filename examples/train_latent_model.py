"""Train the latent model: a small DeepSeek-V2 of real text whose 16 heads share one latent.

    python examples/train_latent_model.py --data DIR --out reference-latent

It learns as the reference model does (``train_reference_model.py``), with its tokenizer, texts,
needle documents and curriculum; only the architecture and the designed start differ
(``latent_start.py``).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from latent_start import build_latent_model
from train_reference_model import Recipe, parser, train

TOKENIZER = Path(__file__).parent / "reference_llama"


def main() -> None:
    args = parser(__doc__.splitlines()[0], "reference-latent", 6e6).parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (args.out / name).is_file():
            shutil.copy(TOKENIZER / name, args.out / name)
    train(args, Recipe(build_latent_model))


if __name__ == "__main__":
    main()
