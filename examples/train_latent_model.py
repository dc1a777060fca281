"""Train the latent model: a small DeepSeek-V2 of real text whose 16 heads share one latent.

    python examples/train_latent_model.py --data DIR --out reference-latent

It learns as the reference model does (``train_reference_model.py``), with its tokenizer, texts,
needle documents and curriculum; only the architecture and the designed start differ
(``latent_start.py``).
"""

from __future__ import annotations

from latent_start import build_latent_model
from train_reference_model import Batches
from training_loop import Recipe, make_parser, train


def main() -> None:
    options = make_parser(__doc__.splitlines()[0], "reference-latent", 6e6)
    train(options.parse_args(), Recipe(build_latent_model, Batches))


if __name__ == "__main__":
    main()
